"""`baechi placeto`: a policy from the command line, what it is worth, and what is refused."""

import argparse
import json
from pathlib import Path

import pytest

from baechi_ext.place.placeto.learning import ALGORITHMS
from baechi_ext.place.placeto.training_task import STARTS
from baechi_runtime.cli.flags.placeto import ACTIONS
from tests.place.placeto.graphs import distinct, towers, write_family


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_family(tmp_path, "nmt", [distinct(8, seed) for seed in range(4)], [towers()])
    return tmp_path


def test_train_evaluate_and_place(run, folder: Path) -> None:
    train = ["placeto", "train", "nmt", f"--folder={folder}", "--num_devices=2", "--updates=2", "--exam_every=1", f"--out={folder}/out"]
    code, out, _ = run(*train, "--graphs=2", "--learning_rate=0.01,0.001", "--json")
    assert (code, json.loads(out)["graphs"], json.loads(out)["done"]) == (0, 3, True)
    policy = json.loads((folder / "out" / "policy.json").read_text())
    assert (policy["config"]["embedding"], policy["training"]["learning_rate"]) == ("rounds", [0.01, 0.001])

    evaluate = ["placeto", "evaluate", "nmt", f"--folder={folder}", "--num_devices=2", f"--policy={folder}/out/policy.json"]
    code, out, _ = run(*evaluate, "--methods=zero_shot,single", "--evaluations=64", f"--out={folder}/found")
    assert code == 0
    assert (folder / "found" / "nmt.md").read_text().startswith(out[: out.index("made by")])
    assert out.splitlines()[0] == "nmt: 1 graphs, 2 devices, 64 plans for each search"

    place = ["place", str(folder / "nmt" / "graph_04.json"), "--num_devices=2", "--placement_method=placeto"]
    code, out, _ = run(*place, f"--placeto_policy={folder}/out/policy.json", "--json")
    assert (code, json.loads(out)["method"]) == (0, "placeto")


def test_help_names_what_there_is() -> None:
    parser = argparse.ArgumentParser()
    ACTIONS["train"].add_flags(parser)
    assert all(f" {name}" in " ".join(parser.format_help().split()) for name in (*ALGORITHMS, *STARTS))


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (["train", "imagenet", "--num_devices=2", "--out=x"], 2, "'imagenet' is neither a family"),
        (["train", "nmt", "--out=x"], 2, "no devices are given"),
        (["train", "nmt", "--num_devices=2"], 2, "required: --out"),
        (["train", "nmt", "--num_devices=2", "--out=x", "--algorithm=best"], 2, "unknown algorithm 'best' of a training; choose one of"),
        (["train", "nmt", "--num_devices=2", "--out=x", "--entropy=1"], 2, "'1' is not two numbers A,B"),
        (["train", "nmt", "--num_devices=2", "--out=x", "--entropy=1,-1"], 2, "is not two numbers of at least 0"),
        (["train", "nmt", "--num_devices=2", "--out=x", "--episodes=1"], 2, "are 1; expected at least 2"),
        (["train", "nmt", "nmt", "--num_devices=2", "--out=x"], 2, "the sources 'nmt' and 'nmt' are both called 'nmt'; give each once"),
        (["evaluate", "a/graphs", "b/graphs", "--num_devices=2"], 2, "'a/graphs' and 'b/graphs' are both called 'graphs'"),
        (["study", "a/graphs", "a/../a/graphs", "--out=x"], 2, "are both called 'graphs'; give each once"),
        (["evaluate", "nmt", "--num_devices=2", "--methods=m_etf, none"], 2, "unknown method 'none' of a comparison; choose some of "),
        (["evaluate", "nmt", "--num_devices=2", "--plot"], 2, "--plot writes to --out, which is not given"),
        (["evaluate", "nmt", "--num_devices=2", "--policy=none"], 1, "cannot read placeto policy file"),
        (["show"], 2, "invalid choice: 'show'"),
    ],
)
def test_what_is_refused(run, folder: Path, line: list[str], code: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    given = [*line, f"--folder={folder}"] if len(line) > 1 else line
    found, out, err = run("placeto", *given)
    assert (found, out) == (code, "")
    assert err.startswith("error:")
    assert message in err
