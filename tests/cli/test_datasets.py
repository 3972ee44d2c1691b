"""`baechi datasets list`, and what both actions refuse."""

import fcntl
import json
import sys
from pathlib import Path

import pytest

from baechi_runtime.host.run_lock import NAME


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an index of nmt."""
    sizes = {"captured_ops": 600, "edges": 300, "compute_us": 40000.0, "longest_path_us": 20000.0}
    graphs = [{"file": f"{n}.json", "split": split, "nodes": n, **sizes} for n, split in ((90, "test"), (110, "train"), (200, "train"))]
    (tmp_path / "nmt").mkdir()
    (tmp_path / "nmt" / "index.json").write_text(json.dumps({"graphs": graphs}))
    return tmp_path


def test_a_table_of_sizes(run, folder: Path) -> None:
    code, out, err = run("datasets", "list", "nmt", f"--folder={folder}")
    assert (code, "error" in err) == (0, False), err  # a machine at work may show progress there
    head, row, _ = (line.split() for line in out.splitlines())
    assert head[:3] == ["family", "train", "test"]
    assert " ".join(row) == "nmt 2 1 600 600 600 90 110 200 300 300 300 40 40 40 ms 50 50 50 %"


def test_json(run, folder: Path) -> None:
    code, out, _ = run("datasets", "list", "nmt", "nmt", f"--folder={folder}", "--json")
    families = json.loads(out)["families"]
    assert (code, [f["family"] for f in families], len(families[0]["graphs"])) == (0, ["nmt"], 3)


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (["make"], 2, "no family is given; choose some of cifar10, ptb, nmt"),
        (["make", "imagenet"], 2, "unknown value 'imagenet'; choose one of cifar10, ptb, nmt"),
        (["show"], 2, "unknown value 'show'; choose one of make, list"),
        (["make", "ptb", "--graphs=3"], 2, "'3' is not an even number from 2 to 100"),
        (["make", "ptb", "--json"], 2, "--json is not for `baechi datasets make`"),
        (["list", "--seed=0"], 2, "--seed is not for `baechi datasets list`"),
        (["list", "cifar10", "--folder=absent"], 1, "make it with `baechi datasets make cifar10 --out=absent`"),
    ],
)
def test_what_is_refused(run, line: list[str], code: int, message: str) -> None:
    found, out, err = run("datasets", *line)
    assert (found, out) == (code, "")
    assert err.startswith("error: ")
    assert message in err


def test_a_folder_in_which_another_run_makes_them(run, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="a folder is locked after PyTorch is found")
    with (tmp_path / NAME).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, out, err = run("datasets", "make", "ptb", f"--out={tmp_path}")
    assert (code, out) == (1, "")
    assert err.endswith(f"error: another run writes into --out={tmp_path}; wait until it ends, or choose another --out\n")


def test_without_torch(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "baechi_runtime.datasets.making", raising=False)
    code, out, err = run("datasets", "make", "ptb", f"--out={tmp_path}")
    assert (code, out) == (1, "")
    assert err.startswith("error: `baechi datasets make` captures real training steps, which needs PyTorch (")
    assert err.endswith("pip install 'baechi-ext[torch]'\n")
    assert list(tmp_path.iterdir()) == []
