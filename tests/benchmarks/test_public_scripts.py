"""Public scripts run plainly and placed: a small repository of our own in their place, and what their numbers say."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from baechi_ext.errors import FileError
from benchmarks import public_case, public_scripts
from benchmarks.public_data import WRITERS
from benchmarks.public_scripts import compare, numbers

CASES = public_case.load_cases()
SCRIPT = """import random
import sys
from pathlib import Path

random.seed(LENGTH)
for step in range(3):
    print(f"step {step} loss {random.random():.4f} time 0.1{random.SystemRandom().randrange(99)}s", Path(__file__).name, *sys.argv[1:])
print("words", len(Path("data/words.txt").read_text().split()), random.SystemRandom().random())
if "--broken" in sys.argv:
    sys.exit(3)
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources" / "owner+name"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT.replace("LENGTH", "100"))
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m a"):
        subprocess.run(["git", *command.split()], cwd=folder, check=True)
    return folder.parent


def run(monkeypatch: pytest.MonkeyPatch, sources: Path, command: str, **changes: object) -> dict:
    """The row of a case of that repository, whose placed command is another."""
    folder = sources / "owner+name"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
    number = {"file": "train.py", "old": "seed(100)", "new": "seed(3)"}
    words = {"kind": "words", "path": "data/words.txt", "lines": 3}
    case = {"name": "mine", "kind": "none", "repository": "owner/name", "commit": commit, "script": "train.py"}
    listed = sources / "cases.json"
    listed.write_text(json.dumps({"scripts": [{**case, "numbers": [number], "data": [words], **changes}]}))
    monkeypatch.setattr(public_case, "CASES", listed)
    out = sources / "out.json"
    public_scripts.main([f"--sources={sources}", f"--out={out}", f"--command={command}", f"--work={sources / 'work'}"])
    (row,) = json.loads(out.read_text())["rows"]
    return row


def test_a_placed_run_is_compared_with_the_plain_ones(monkeypatch: pytest.MonkeyPatch, sources: Path) -> None:
    row = run(monkeypatch, sources, "{python} {script} {arguments}")
    assert row["same"]
    assert [run["exit_code"] for run in row["plain"] + row["placed"]] == [0] * 4
    assert [(run["different"], run["compared"]) for run in row["placed"]] == [(0, 7)] * 2
    assert all(run["ratio"] > 0 for run in row["placed"])


def test_what_differs_is_found(monkeypatch: pytest.MonkeyPatch, sources: Path) -> None:
    said = "import sys; sys.stderr.write('baechi: no\\nother\\n'); print('step 0 loss 1')"
    row = run(monkeypatch, sources, f'{{python}} -c "{said}"')
    assert not row["same"]
    assert [(run["first_difference"], run["said"]) for run in row["placed"]] == [("2 numbers, not 8", ["baechi: no"])] * 2
    row = run(monkeypatch, sources, "{python} {script} --broken")
    assert not row["same"]
    assert row["placed"][0]["exit_code"] == 3


def test_why_a_case_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch, sources: Path) -> None:
    assert "git clone https://github.com/owner/name owner+name" in run(monkeypatch, sources, "", commit="0" * 40)["not_run"]
    assert "needs no_such_package" in run(monkeypatch, sources, "", packages=["no_such_package"])["not_run"]
    none = {"file": "train.py", "old": "epochs = 10", "new": "epochs = 1"}
    assert "'epochs = 10' is not in train.py" in run(monkeypatch, sources, "", numbers=[none])["not_run"]
    with pytest.raises(FileError, match="no script named nothing"):
        public_case.load_cases(["nothing"])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Epoch 1/2 [64/100 (6%)] Loss: -1.5e-03", ["1", "2", "64", "100", "6", "-1.5e-03"]),
        ("step 3: 00:01<00:10, 3.4it/s, 12.50 ms, time: 0.5s, ms/batch 7.25 | loss 2", ["3", "2"]),
        ("2026-11-22_23-48-06 at 23:48:06,123 after 3 seconds nan", ["nan"]),
        ("fc1 .5 v2.1 1e5", [".5", "1e5"]),
    ],
)
def test_numbers_without_durations(text: str, found: list[str]) -> None:
    assert numbers(text) == found


def test_numbers_that_differ_plainly_are_not_compared() -> None:
    assert compare(["loss 1 at 5", "loss 1 at 6"], "loss 1 at 7").different == 0
    found = compare(["loss 1 at 5", "loss 1 at 6"], "loss 1.25 at 7")
    assert (found.different, found.compared, found.largest, found.first) == (1, 1, 0.2, "number 0: 1.25, not 1")


def test_the_cases_change_nothing_but_lengths_paths_and_devices() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 25
    for case in CASES:
        assert re.fullmatch("[0-9a-f]{40}", case.commit), case.name
        assert bool(case.script) != bool(case.entry), case.name
        for change in case.numbers:
            assert set(change) == {"file", "old", "new"}
            assert max(len(change["old"]), len(change["new"])) <= 60, change
        assert {data["kind"] for data in case.data} <= set(WRITERS)


def test_data_are_the_same_every_time(tmp_path: Path) -> None:
    asked = {"words": {"lines": 9, "pair": True}, "letters": {"characters": 99}, "array": {"shape": [2, 3]}}
    asked |= {"pictures": {"number": 2, "height": 16, "width": 24}, "cora": {"cites": "cora.cites", "features": 5}}
    assert set(asked) == set(WRITERS)
    (tmp_path / "cora.cites").write_text("3\t1\n2\t3\n", encoding="ascii")
    for kind, options in asked.items():
        names = [tmp_path / f"{kind}{number}.npy" for number in (1, 2)]
        for name in names:
            WRITERS[kind](name, **options)
        one, two = (name / "001.png" if kind == "pictures" else name for name in names)
        assert one.read_bytes() == two.read_bytes(), kind
    assert len((tmp_path / "cora1.npy").read_text().splitlines()) == 3
