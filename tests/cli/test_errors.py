"""The answer to bad input: one `error:` line that says what to do next, an exit code, no traceback, no file."""

import errno
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baechi_ext.errors import GraphError
from baechi_runtime.drivers import pipeline
from tests.cli.files import GRAPH, ROOT, a_graph, write

Run = Callable[..., tuple[int, str, str]]
PLACE = ("--placement_method=m_etf", "--num_devices=2")


def check_error(result: tuple[int, str, str], code: int) -> str:
    """The message of the one error line of a failed run."""
    assert result[0] == code
    assert result[1] == ""
    assert result[2].count("\n") == 1
    assert result[2].startswith("error: ")
    assert "Traceback" not in result[2]
    return result[2].removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize("command", [("explain",), ("report",), ("diff", GRAPH), ("simulate", GRAPH), ("export", GRAPH)])
def test_a_name_that_no_file_can_have(run: Run, command: tuple[str, ...]) -> None:
    message = check_error(run(*command, "x" * 300), 1)
    assert len(message) < 700


def test_what_a_terminal_would_obey_is_shown(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "g.json", a_graph(edges=[("a", "b", 4)], a={"phase": "\x1b[31m" + "x" * 6000}))
    message = check_error(run("place", str(path), *PLACE), 1)
    assert "\x1b" not in message
    assert "op 'a' has phase '\\x1b[31mxxx" in message
    assert "expected one of forward, backward, update" in message
    assert len(message) < 600


@pytest.mark.parametrize("command", ["simulate", "explain", "diff"])
def test_names_in_results_are_text_to_a_terminal_too(run: Run, tmp_path: Path, command: str) -> None:
    name, free = "b\x1b[31m\x07\u202e", {"us_per_byte": 0, "latency_us": 5}
    graph = write(tmp_path / "graph.json", a_graph(edges=[("a", name, 4)], b={"id": name}))
    cluster = {"devices": [{"name": "x"}, {"name": f"d{name}"}], "links": {"default": free}}
    plans = [write(tmp_path / f"{d}.json", {"cluster": cluster, "placement": {"a": 0, name: 1, "c": d}}) for d in (0, 1)]
    code, out, _ = run(command, *{"simulate": (graph, plans[0]), "explain": plans[:1], "diff": plans}[command])
    assert code == 0
    assert "db\\x1b[31m\\x07\\u202e" in out
    assert not {"\x1b", "\x07", "\u202e"} & set(out)


def test_devices_are_not_read(run: Run) -> None:
    assert "it is a device; give a file or a pipe" in check_error(run("place", "/dev/zero", *PLACE), 1)


BAD_GRAPHS: list[tuple[dict[str, Any] | str, str]] = [
    (a_graph(edges=[("a", "b", 4), ("b", "c", 4), ("c", "a", 4)]), "the graph has a cycle of 3 ops"),
    (a_graph(edges=[("a", "x", 4)]), "edge 'a' -> 'x': its target 'x' is not an op; add the op or drop the edge"),
    (a_graph(a={"id": "b"}), "op id 'b' appears twice, at positions 0 and 1; give every op its own id"),
    (a_graph(edges=[("a", "b", 4), ("a", "c", 5)]), "tensor '' of op 'a' has two sizes, 4 and 5 bytes (edge to 'c'); give"),
    (a_graph(a={"compute_us": None}), "op 'a' has no \"compute_us\"; every op needs its time"),
    (a_graph(a={"compute_us": -3}), "compute_us of op 'a' is -3; expected at least 0"),
    (json.dumps(a_graph()).replace("10", "NaN", 1), "compute_us of op 'a' is nan; expected a finite number"),
    (json.dumps(a_graph())[:-30], "is not valid JSON"),
    ("a poem", "is not valid JSON"),
    ("", "is not valid JSON"),
    ("[]", "holds a JSON list, expected an object"),
    ({**a_graph(), "schema_version": 9}, "has schema_version 9; this program reads 1"),
]


@pytest.mark.parametrize(("content", "message"), BAD_GRAPHS, ids=[m for _, m in BAD_GRAPHS])
def test_a_bad_graph(run: Run, tmp_path: Path, content: dict[str, Any] | str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    said = check_error(run("place", path, *PLACE, "--out", tmp_path / "plan.json"), 1)
    assert message in said
    assert "bad.json" in said
    assert list(tmp_path.iterdir()) == [path]


def test_a_bad_graph_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.json", a_graph(a={"compute_us": -3}))
    command = [sys.executable, "-m", "baechi_ext", "place", str(path), *PLACE, "--out", str(tmp_path / "plan.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = check_error((done.returncode, done.stdout, done.stderr), 1)
    assert "compute_us of op 'a' is -3" in said
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_file(run: Run, tmp_path: Path) -> None:
    said = check_error(run("place", tmp_path / "no.json", *PLACE), 1)
    assert "cannot read graph file" in said
    assert "No such file or directory; check the path" in said


def test_a_folder_as_a_file(run: Run, tmp_path: Path) -> None:
    assert "Is a directory" in check_error(run("place", tmp_path, *PLACE), 1)


@pytest.mark.parametrize("out", ["no/such/folder/plan.json", "."])
def test_an_unwritable_out(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: Path, out: str) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    said = check_error(run("place", graph, *PLACE, "--out", out), 1)
    assert f"cannot write '{out}'" in said
    assert "choose a file in a folder that exists and is writable" in said
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_has_been_removed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: Path) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    message = check_error(run("place", graph, *PLACE, "--out=plan.json"), 1)
    assert message == "the folder that this command was started in has been removed; start it in another one"


def test_an_unwritable_out_is_told_before_the_work(run: Run, monkeypatch: pytest.MonkeyPatch, graph: Path) -> None:
    monkeypatch.setattr(pipeline, "plan", None)  # whoever calls it now gets a TypeError
    assert "No such file or directory" in check_error(run("place", graph, *PLACE, "--out", "no/such/plan.json"), 1)


# A model that does not fit


@pytest.mark.parametrize("method", ["single", "contiguous", "m_topo", "m_etf", "m_sct"])
def test_a_colocation_group_that_fits_nowhere(run: Run, tmp_path: Path, method: str) -> None:
    heavy = {"persistent_bytes": 600, "colocation": "embedding"}
    path = write(tmp_path / "g.json", a_graph(a=heavy, c=heavy))
    flags = (f"--placement_method={method}", "--num_devices=3", "--device_memory=1000", "--out", tmp_path / "p.json")
    code, out, err = run("place", path, *flags, "--json")
    assert code == 1
    said = json.loads(out)
    assert said["status"] == "infeasible"
    assert err == f"error: {said['error']}\n"
    assert "colocation group 'embedding' needs at least 12" in said["error"]
    assert "the largest device has 1000" in said["error"]
    assert "--device_memory" in said["error"]
    assert not (tmp_path / "p.json").exists()


def test_one_device_that_is_too_small(run: Run, graph: Path) -> None:
    said = check_error(run("place", graph, "--num_devices=1", "--device_memory=20"), 1)
    assert "'device:0' has 20" in said
    assert "at least 3" in said


def test_a_graph_that_is_proven_not_to_pack(run: Run, tmp_path: Path) -> None:
    # Three ops of 60 on two devices of 100: each device holds one, and all together 180 fit into 200.
    path = write(tmp_path / "g.json", a_graph(**{v: {"persistent_bytes": 60} for v in "abc"}, edges=[]))
    code, out, err = run("place", path, "--num_devices=2", "--device_memory=100", "--json")
    assert (code, json.loads(out)["status"]) == (1, "infeasible")
    assert "no plan can exist: the devices hold 100, 100 bytes" in err


# Plans of other graphs


def test_a_plan_of_another_graph(run: Run, tmp_path: Path, graph: Path, plan: Path) -> None:
    other = write(tmp_path / "other.json", a_graph(b={"op": "something else"}))
    said = check_error(run("simulate", other, plan), 1)
    assert "the plan is of another graph: the first op that differs is 'b'" in said
    assert "make a new plan for this graph" in said


def test_a_cut_off_plan(run: Run, tmp_path: Path, graph: Path, plan: Path) -> None:
    cut = tmp_path / "cut.json"
    cut.write_text(plan.read_text()[:-40])
    assert "plan file" in check_error(run("simulate", graph, cut), 1)


def test_a_plan_with_too_few_devices(run: Run, graph: Path, plan: Path) -> None:
    said = check_error(run("simulate", graph, plan, "--num_devices=1"), 1)
    assert "is placed on device 1; expected 0, the only one" in said


def test_a_bad_cluster_file(run: Run, tmp_path: Path, graph: Path) -> None:
    path = write(tmp_path / "c.json", {"devices": []})
    assert 'c.json: a cluster needs "links"' in check_error(run("place", graph, "--cluster", path), 1)


# Wrong usage

WRONG_USAGE = [
    ((), "the following arguments are required: COMMAND; see baechi --help"),
    (("sell",), "invalid choice: 'sell' (choose from "),
    (("trian",), "argument COMMAND: invalid choice: 'trian' (did you mean train?); see baechi --help"),
    (("--verison",), "unrecognized arguments: --verison (did you mean --version?); see baechi --help"),
    (("place",), "the following arguments are required: GRAPH; see baechi place --help_all"),
    (("place", GRAPH), "no devices are given; add --num_devices=N or --cluster=FILE"),
    (("place", GRAPH, "--frobnicate"), "unrecognized arguments: --frobnicate"),
    (("place", GRAPH, "--num_dev=2"), "unrecognized arguments: --num_dev=2 (did you mean --num_devices?); see baechi place --help_all"),
    (("train", "--model=gpt2"), "unrecognized arguments: --model=gpt2 (did you mean --model_name?); see baechi train --help_all"),
    (("place", GRAPH, "--placement_method=sct"), "unknown value 'sct' (did you mean m_sct?); choose one of "),
    (("train", "--method=m_sct"), "unrecognized arguments: --method=m_sct (did you mean --placement_method?); see baechi train --help_all"),
    (("train", "own.py", "--epochs", "3"), "--epochs 3; what own.py is to be given stands behind a --; see baechi train --help_all"),
    (("place", GRAPH, "--out"), "argument --out: expected one argument"),
    (("place", GRAPH, "--num_devices=2", "--cluster=c.json"), "--cluster and --num_devices cannot be used together; give one of them"),
    (("place", GRAPH, "--num_devices=2", "--memory_fraction=0.5"), "--memory_fraction needs devices of limited memory"),
    (("place", GRAPH, "--num_devices=0"), "argument --num_devices: '0' is not a whole number from 1 to 1024"),
    (("place", GRAPH, "--num_devices=two"), "'two' is not a whole number from 1 to 1024"),
    (("place", GRAPH, "--device_memory=16Gib/s"), "'16Gib/s' is not a size; write it like 16GiB, 800MB or 1000000 (bytes)"),
    (("place", GRAPH, "--device_memory=-5"), "'-5' is not a size"),
    (("place", GRAPH, "--device_memory=12G"), "'12G' is not a size"),
    (("place", GRAPH, "--device_memory=0"), "'0' is less than a byte; give a size of at least 1"),
    (("train", "--device_memory=0.0001KB"), "'0.0001KB' is less than a byte"),
    (("train", "--timeout=1e10"), "'1e10' is not a number above 0 and up to 1e+09"),
    (("probe-links", "--timeout=1e10"), "'1e10' is not a number above 0 and up to 1e+09"),
    (("place", GRAPH, "--memory_fraction=0"), "'0' is not a number above 0 and up to 1"),
    (("place", GRAPH, "--memory_fraction=nan"), "'nan' is not a finite number"),
    (("place", GRAPH, "--comm_cost_coeffs=1"), "'1' is not two numbers a,b"),
    (("place", GRAPH, "--comm_cost_coeffs=1,x"), "'x' is not a finite number"),
    (("place", GRAPH, "--comm_cost_coeffs=1,-2"), "'1,-2' has a negative coefficient; expected at least 0"),
    (("place", GRAPH, "--placement_method=best"), "unknown value 'best'; choose one of auto, refine, single, "),
    (("place", GRAPH, "--placement_method=m_eft"), "unknown value 'm_eft' (did you mean m_etf?); choose one of auto, refine, "),
    (("place", GRAPH, "--grouper=best"), "unknown value 'best'; choose one of tf, coplace, grain"),
    (("place", GRAPH, "--placer_type=best"), "unknown value 'best'; choose one of default, colocation, fusion"),
    (("place", GRAPH, "--placement_method=m_topo", "--traversal_order=best"), "unknown value 'best'; choose one of auto, topo, "),
    (("place", GRAPH, "--num_devices=2", "--traversal_order=bfs"), "--traversal_order is only for methods that visit ops in an order"),
    (("place", GRAPH, "--num_devices=2", "--placeto_episodes=9"), "are only for --placement_method=placeto, not auto; drop them"),
    (("place", GRAPH, "--sct_threshold=2"), "'2' is not a number from 0 to 1"),
    (("place", GRAPH, "--seed=-1"), "'-1' is not a whole number from 0 to"),
    (("place", GRAPH, "--time_limit=0"), "'0' is not a number above 0"),
    (("train", "--strict"), "--strict is for scripts; drop it, or name one"),
    (("train", "--hardware=h100", "--no_cache"), "--no_cache is for scripts; drop it, or name one"),
    (("train", "own.py", "--strict", "--fallback"), "--strict and --fallback say the opposite of each other"),
    (("train", "--sharding=pase", "--pin=a=0"), "--pin is for a plan that places ops, and --sharding makes none; drop it"),
    (("train", "--sharding=pase", "--time_limit=5"), "--time_limit is for a plan that places ops"),
    (("train", "--sharding=pase", "--num_gpus=2", "--use_free_memory"), "--use_free_memory is for a plan that places ops"),
    (("probe-links", "--out=links.json", "--samples=./links.json"), "--out and --samples are both links.json; give each a file of its own"),
    (("simulate", GRAPH), "the following arguments are required: PLAN"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG_USAGE, ids=[m for _, m in WRONG_USAGE])
def test_wrong_usage(run: Run, argv: tuple[str, ...], message: str) -> None:
    assert message in check_error(run(*argv), 2)


def test_a_missing_graph_is_named_before_missing_devices(run: Run) -> None:
    message = "cannot read graph file 'nowhere.json': No such file or directory; check the path"
    assert check_error(run("place", "nowhere.json"), 1) == message


def test_a_usage_error_in_a_process_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-m", "baechi_ext", "place", "x", "--nonsense"], cwd=ROOT, capture_output=True, text=True)
    assert "unrecognized arguments: --nonsense" in check_error((done.returncode, done.stdout, done.stderr), 2)


# What stops a run from outside


def test_ctrl_c(run: Run, monkeypatch: pytest.MonkeyPatch, graph: Path, tmp_path: Path) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "plan", interrupted)
    assert check_error(run("place", graph, *PLACE, "--out", tmp_path / "plan.json"), 130) == "interrupted"
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("error", [AssertionError, GraphError])
def test_ctrl_c_behind_an_error(run: Run, monkeypatch: pytest.MonkeyPatch, graph: Path, error: type[Exception]) -> None:
    """On its way out a library's context manager may raise what it takes for a fault of its own."""

    class Scope:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None:
            raise error("concurrent access?")

    def interrupted(*_: object) -> None:
        with Scope():
            raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "plan", interrupted)
    assert check_error(run("place", graph, *PLACE), 130) == "interrupted"


def test_an_error_among_its_own_causes(run: Run, monkeypatch: pytest.MonkeyPatch, graph: Path) -> None:
    def failing(*_: object) -> None:
        first, second = GraphError("first"), GraphError("second")
        first.__cause__, second.__cause__ = second, first
        raise first

    monkeypatch.setattr(pipeline, "plan", failing)
    assert check_error(run("place", graph, *PLACE), 1) == "first"


def test_a_reader_that_goes_away(graph: Path, plan: Path) -> None:
    command = [sys.executable, "-m", "baechi_ext", "simulate", str(graph), str(plan), "--json"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert [line for line in process.stderr if not line.startswith("simulating ")] == []  # progress, on a slow machine
    process.stderr.close()
    assert process.wait() == 141


@pytest.mark.parametrize(
    ("number", "why", "said"),
    [
        (errno.ENOSPC, "No space left on device", "cannot write: No space left on device; make room for results, and where temporary"),
        (errno.ENOENT, "No usable temporary directory found in ['/tmp']", "No usable temporary directory .*; make room in one"),
    ],
)
def test_a_full_disk_elsewhere_is_not_stdouts(
    run: Run, monkeypatch: pytest.MonkeyPatch, graph: Path, number: int, why: str, said: str
) -> None:
    """As where temporary files are, whose errors name no file."""

    def full(*_: object, **__: object) -> None:
        raise OSError(number, why)

    monkeypatch.setattr(pipeline, "plan", full)
    assert re.match(said, check_error(run("place", graph, *PLACE), 1))


def test_a_search_needs_no_folder_for_temporary_files(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, graph: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    code, _, err = run("place", graph, "--num_devices=2", "--placement_method=exact")
    assert (code, "Traceback" in err) == (0, False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout(graph: Path, plan: Path) -> None:
    command = [sys.executable, "-m", "baechi_ext", "simulate", str(graph), str(plan), "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr.splitlines()[-1] == "error: cannot write the result to stdout: No space left on device; choose another place for it"
    assert done.returncode == 1
