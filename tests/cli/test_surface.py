"""The surface of the command line: its flags are frozen here, so that none changes unnoticed. And how it says what it does."""

import argparse
import io
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import baechi_ext
from baechi_ext.group.registry import GROUPERS, PLACER_TYPES
from baechi_ext.ir import Cluster, Device, Op, OpGraph
from baechi_ext.ir.made_by import FRAMEWORKS
from baechi_ext.place.adjust import ADJUSTMENTS
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.registry import METHODS, place
from baechi_runtime.cli.doctor.packages import PACKAGES
from baechi_runtime.cli.flags.parser import with_underscores
from baechi_runtime.cli.flags.placeto import ACTIONS as PLACETO_ACTIONS
from baechi_runtime.cli.main import COMMANDS, Command, make_parser, parsed
from baechi_runtime.drivers.placement import log_device_placement
from baechi_runtime.report import progress as progress_module
from baechi_runtime.report import tables
from baechi_runtime.report.progress import progress, restore_terminal, rounds, set_loudness

CLUSTER = {"--cluster", "--num_devices", "--num_gpus", "--device_memory", "--memory_fraction", "--comm_cost_coeffs"}
PLACING = {"--placement_method", "--initial_plan", "--expert_file", "--grouper", "--placer_type", "--only_forward"} | {
    "--device_map",
    "--pin",
    "--sct_threshold",
    "--traversal_order",
    "--placeto_policy",
    "--placeto_episodes",
    "--seed",
    "--time_limit",
    "--only_important_ops",
    "--consider_all_edges_in_grouping",
    "--resolve_cycle",
    "--fusion_check_disjoint_paths",
    "--fusion_allow_cycle",
    "--adjustment_method",
    "--adjustment_with_memory_limit",
    "--comm_cost_factor",
    "--cost_factor",
    "--placer_memory_fraction",
}
STEP = {"--model_name", "--batch_size", "--image_size", "--optimizer", "--learning_rate", "--num_steps", "--timeout", "--workers"}
HARDWARE = {"--hardware", "--measured_on"}
CUDA = {"--split_gpu", "--use_free_memory"}
TENSORFLOW = {"--framework", "--cluster_hosts", "--task_index"}
MODEL = {"--vocab_size", "--max_seq_length", "--rnn_units", "--rnn_unit_type", "--num_layers", "--encoder_type", "--residual"} | {
    "--rnn_chunk",
    "--nasnet_cells",
    "--nasnet_filters",
    "--large",
    "--d_model",
    "--d_ff",
    "--num_heads",
    "--dropout",
    "--resnet_filters",
}
SCRIPT = {"--tensorboard", "--verify_steps", "--strict", "--keep_placed", "--fallback", "--no_cache", "--cache_dir"}
RUN = {"--train_steps", "--checkpoint", "--checkpoint_every", "--resume"}
BAECHI = {"--data_format", "--logdir", "--log_device_placement", "--log_placer_device_placement"}
REFUSED = {f"--{name}" for name in (
    "disable_nmt_colocation", "grappler", "grappler_time", "stats_path", "device_info_path", "log_colocation_graph",
)}  # fmt: skip
ORIGINAL_PASE = {"-p", "--procs", "-b", "--batch", "-m", "--model", "-g", "--graph", "--flops", "--bw", "--profile", "--measure"} | {
    "-d", "--dump_graph", "--algo", "-a", "--analyse",
}  # fmt: skip
TRAIN = CLUSTER | PLACING | STEP | CUDA | TENSORFLOW | MODEL | {
    "--colocate_grads_with_ops", "--relaxed_random", "--cost_path", "--config", "--cuda_graphs", "--no_cuda_graphs",
    "--device_speeds", "--out", "--json", "--compile",
}  # fmt: skip
FLAGS = {
    "place": CLUSTER | PLACING | HARDWARE | {"--config", "--out", "--json"},
    "train": TRAIN | SCRIPT | RUN | BAECHI | REFUSED | HARDWARE | {"--costgen", "--sharding", "--mesh", "--microbatches", "--batch_norm"},
    "compare": TRAIN - {"--placement_method"} | {"--placement_methods", "--microbatches", "--batch_norm"},
    "probe-links": CUDA | {
        "--framework", "--num_devices", "--num_gpus", "--workers", "--max_exponent", "--timeout", "--out", "--samples", "--json",
    },
    "datasets": {"--out", "--graphs", "--seed", "--folder", "--json"},
    "placeto": set(),
    "pase": ORIGINAL_PASE | MODEL | {
        "--model_name", "--batch_size", "--image_size", "--cost_path", "--executable",
        "--cost_model", "--order", "--table_memory", "--beam", "--halo", "--device_memory", "--optimizer_words", "--latency",
        "--devices_per_node", "--node_bw", "--node_latency", "--overlap", "--compare", "--out", "--json",
    },
    "simulate": CLUSTER | {"--comm_cost_factor", "--cost_factor", "--seed", "--pin", "--json"},
    "explain": CLUSTER | {"--graph", "--json"},
    "diff": {"--graph", "--json"},
    "export-device-map": {"--out", "--json"},
    "trace": {"--out", "--ranks"},
    "report": {"--out"},
    "plot": {"--out"},
    "export": {"--format", "--out", "--json"},
    "doctor": {"--json"},
}  # fmt: skip
SOURCES = CLUSTER | {"--folder", "--most_graphs"}
PLACETO_FLAGS = {
    "train": SOURCES | {"--policy", "--algorithm", "--visits", "--updates", "--graphs", "--episodes"} | {
        "--exam_every", "--workers", "--patience", "--start", "--learning_rate", "--entropy", "--discount", "--seed", "--time_limit",
        "--tensorboard", "--out", "--json",
    },
    "evaluate": SOURCES | {"--policy", "--methods", "--evaluations", "--seed", "--out", "--plot", "--json"},
    "study": SOURCES | {"--orders", "--split", "--repeats", "--episodes", "--seed", "--workers", "--budget", "--out", "--plot", "--json"},
}  # fmt: skip


def test_commands_are_frozen() -> None:
    assert {command.name for command in COMMANDS} == set(FLAGS)


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_frozen(name: str) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    next(c for c in COMMANDS if c.name == name).add_flags(parser)
    assert {s for action in parser._actions for s in action.option_strings} == FLAGS[name]


def test_actions_of_placeto_are_frozen() -> None:
    assert set(PLACETO_ACTIONS) == set(PLACETO_FLAGS)


@pytest.mark.parametrize("name", PLACETO_FLAGS)
def test_flags_of_placeto_are_frozen(name: str) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    PLACETO_ACTIONS[name].add_flags(parser)
    assert {s for action in parser._actions for s in action.option_strings} == PLACETO_FLAGS[name]
    assert all(action.help for action in parser._actions)


def test_every_command_and_flag_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            make_parser().parse_args([command.name, "--help"])
        parser = argparse.ArgumentParser(add_help=False)
        command.add_flags(parser)
        assert all(action.help for action in parser._actions)
    assert "--placement_method" in capsys.readouterr().out


def test_every_command_takes_quiet_and_verbose(run: Callable[..., tuple[int, str, str]]) -> None:
    """Anywhere before a script's own arguments; the traceback of an error is for those who ask."""
    for line in ("-q simulate graph.json plan.json", "simulate graph.json plan.json --quiet", "placeto evaluate -q nowhere"):
        assert "quiet" in parsed(line.split())
    assert parsed(["-q", "--verbose", "train", "s.py", "--", "-q", "--epochs"]).script_args == ["-q", "--epochs"]
    (code, _, plain), (same_code, _, asked) = run("place", "nothing.json"), run("place", "nothing.json", "-v")
    assert code == same_code == 1
    assert "Traceback" not in plain and "FileError" in asked
    assert asked.endswith(plain)


def said_of(message: str, news: str, seconds: float, monkeypatch: pytest.MonkeyPatch, *, quiet: bool, verbose: bool) -> str:
    """All that is said of work of that name, with news after so many seconds."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    set_loudness(quiet=quiet, verbose=verbose)
    try:
        with progress(message, delay_seconds=0.01) as show:
            time.sleep(seconds)
            show(news)
    finally:
        set_loudness(quiet=False, verbose=False)
    return sys.stderr.getvalue()


def test_what_is_done_is_said_as_loud_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {}
    for quiet, verbose in ((True, False), (False, False), (False, True)):
        found = said_of("placing", "best 1 ms", 0.6, monkeypatch, quiet=quiet, verbose=verbose)
        said[quiet, verbose] = re.sub(r"\d+\.\d+", "0", found)
    assert said == {
        (True, False): "",
        (False, False): "placing ...\n  best 1 ms\n",
        (False, True): "placing ...\n  best 1 ms\n  took 0 s\n",
    }


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["tr"], {"train", "trace"}),
        (["train", "--model_n"], {"--model_name"}),
        (["train", "--placement_method", "m_"], {method for method in METHODS if method.startswith("m_")}),
        (["place", "--cluster", "clu"], {"cluster.json"}),
    ],
)
def test_bash_completes_commands_flags_values_and_files(tmp_path: Path, words: list[str], found: set[str]) -> None:
    (tmp_path / "cluster.json").touch()
    script = subprocess.run([sys.executable, "-m", "baechi_ext", "--completion", "bash"], capture_output=True, text=True, check=True).stdout
    (tmp_path / "completion.sh").write_text(script)
    line = shlex.join(["baechi", *words])
    asked = f'. ./completion.sh; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_baechi; printf "%s\\n" "${{COMPREPLY[@]}}"'
    completed = subprocess.run(["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert set(completed.stdout.split()) == found


def test_every_choice_begins_a_line_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        make_parser().parse_args(["place", "--help_all"])
    begins = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert {f"{name}:" for table in (METHODS, GROUPERS, PLACER_TYPES, ADJUSTMENTS) for name in table} <= begins


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.first], ids=lambda command: command.name)
def test_help_shows_what_most_people_need(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        make_parser().parse_args([command.name, "--help"])
    out = capsys.readouterr().out
    assert tuple(re.findall(r"^  (--\w+)", out, re.MULTILINE)) == (*command.first, "--help_all")
    assert len(command.first) <= 13
    assert re.search(rf"^baechi {command.name} --help_all shows all \d+ flags\.$", out, re.MULTILINE)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        make_parser().parse_args(["--version"])
    found = dict(part.rsplit(" ", 1) for part in capsys.readouterr().out.strip().split(", "))
    assert found.pop("baechi") == baechi_ext.__version__
    assert found.pop("Python") == platform.python_version()
    assert found == {package.name: package.version() for package in PACKAGES if package.name in FRAMEWORKS and package.version()}


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_no_table_cuts_a_number(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where it has no room, its rows stand below each other."""
    rows = [("eager, one device", "-", "868.1 ms to 1.133 s", "of some length"), ("m_sct, placed", "619 ms", "602.3 ms to 844.2 ms", "")]
    monkeypatch.setattr(tables, "console", lambda _: Console(width=width, file=sys.stdout))
    tables.show(tables.table_of(("step", "predicted", "min to max", "note"), rows, words=["note"]))
    out = capsys.readouterr().out
    assert "\u2026" not in out
    assert all(number in out for number in ("619 ms", "868.1 ms to 1.133 s", "602.3 ms to 844.2 ms"))
    assert ("\n  predicted   619 ms\n" in out) == (width < 45)


def test_underscores() -> None:
    line = ["place", "a-b.json", "--num-devices=2", "--out", "x-y", "--cluster=c-d.json", "-h", "--", "--as-it-is"]
    assert with_underscores(line) == [
        "place", "a-b.json", "--num_devices=2", "--out", "x-y", "--cluster=c-d.json", "-h", "--", "--as-it-is",
    ]  # fmt: skip


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_quick_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress("placing"):
        pass
    assert sys.stderr.getvalue() == ""


def test_what_takes_long_says_so_in_one_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress("placing [bold]x", delay_seconds=0.01):
        time.sleep(0.1)
    assert sys.stderr.getvalue() == "placing [bold]x ...\n"


@pytest.mark.parametrize("verbose", [False, True])
def test_names_in_what_is_said_do_not_reach_the_terminal_raw(monkeypatch: pytest.MonkeyPatch, *, verbose: bool) -> None:
    monkeypatch.setattr(progress_module, "_FIRST_PAUSE_SECONDS", 0.0)
    said = said_of("reading \x1b[2J a\nb", "\x9b2J c\r\nd", 0.1, monkeypatch, quiet=False, verbose=verbose)
    assert said.startswith("reading \\x1b[2J a b ...\n  \\x9b2J c\\r d\n")


def test_names_of_ops_and_devices_are_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    graph = OpGraph.from_edges([Op("a\x1b[2J\nb")], [])
    plan = place("single", graph, Cluster((Device("cpu\t0"),)), PlaceOptions())
    log_device_placement(SimpleNamespace(graph=graph, result=plan))  # type: ignore[arg-type]  # of a placement these are looked at
    assert sys.stderr.getvalue() == "a\\x1b[2J b -> cpu\\t0\n"


def test_what_takes_very_long_says_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress_module, "_LONG_SECONDS", 0.05)
    with progress("placing", delay_seconds=0.01):
        time.sleep(0.1)
    assert sys.stderr.getvalue() == "placing ...\n  took 0 s\n"


def test_the_rest_of_rounds_is_estimated_from_those_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now, news = [0.0], []
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    told = rounds(news.append, 10)
    for i, seconds in ((0, 0), (2, 60), (8, 80)):
        now[0] = seconds
        told(i)
    assert news == ["round 1 of 10", "round 3 of 10, about 4 min left", "round 9 of 10, about 20 s left"]


def test_news_is_shown_on_a_terminal_with_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    with progress("placing", delay_seconds=0.01) as show:
        time.sleep(0.05)
        show("best [red]1 ms")
        time.sleep(0.3)
        assert progress_module._shown
    shown = sys.stderr.getvalue()
    assert "placing: best [red]1 ms" in shown
    assert "0:00:00" in shown
    assert progress_module._shown == []


def test_news_that_have_no_room_are_left_out_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    with progress("placing 1,000 ops on 2 devices", delay_seconds=0.01) as show:
        show("best 8.301 ms, gap 0.5%, bound 8.26 ms")
        time.sleep(0.3)
    shown = sys.stderr.getvalue()
    assert "2 devices: best 8.301 ms " in shown
    assert "0:00:00" in shown
    assert "gap" not in shown
    assert "\u2026" not in shown


def test_the_terminal_is_restored_where_a_spinner_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    with progress("placing", delay_seconds=0.01):
        time.sleep(0.1)
        restore_terminal()
        after = sys.stderr.getvalue()
    assert after.endswith("\x1b[?25h")
    assert sys.stderr.getvalue().rindex("\x1b[?25h") > sys.stderr.getvalue().rindex("\x1b[?25l")
    restore_terminal()


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_a_terminal_sees_a_spinner(monkeypatch: pytest.MonkeyPatch, no_color: str, coloured: bool) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    with progress("placing", delay_seconds=0.01):
        time.sleep(0.2)
    shown = sys.stderr.getvalue()
    assert "placing ..." in shown
    assert ("\x1b[32m" in shown) is coloured  # the spinner's colour
    assert shown.endswith("\x1b[?25h") or "\x1b[?25h" in shown  # the cursor is back


def test_an_error_ends_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(ZeroDivisionError), progress("placing", delay_seconds=0.05):
        raise ZeroDivisionError
    time.sleep(0.1)
    assert sys.stderr.getvalue() == ""


@pytest.mark.parametrize(("us", "text"), [(0, "0 us"), (1.23456, "1.235 us"), (1500, "1.5 ms"), (2.5e6, "2.5 s")])
def test_times(us: float, text: str) -> None:
    assert tables.as_time(us) == text


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**34, "16 GiB"), (2**41, "2 TiB")])
def test_sizes(size: float, text: str) -> None:
    assert tables.as_size(size) == text
