"""Training scripts as people write them, run unmodified and placed: they print what they print unplaced, to the last digit."""

import contextlib
import io
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baechi_ext.errors import CaptureError, FileError, ParityError
from baechi_ext.place.common import PlaceOptions
from runtime.calls.script import ScriptRequest, ScriptRun, run_script
from runtime.pipeline import PlanRequest
from runtime.train_request import TrainRequest

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are added up in one order everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def placed(
    path: Path, *arguments: str, verify_steps: int = 2, fallback: bool = False, seed: int = 0, num_devices: int = 2
) -> tuple[str, ScriptRun]:
    """What the script prints, run on two devices, each op on any of them."""
    request = TrainRequest("", PlanRequest(method="random", options=PlaceOptions(seed=seed)), num_devices=num_devices)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run = run_script(ScriptRequest(str(path), arguments, request, verify_steps, fallback))
    return printed.getvalue(), run


def unplaced(path: Path, *arguments: str) -> str:
    """What it prints as it is."""
    printed, argv = io.StringIO(), sys.argv
    sys.argv = [str(path), *arguments]
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = argv
    return printed.getvalue()


def numbers(text: str) -> list[float]:
    return [float(n) for n in re.findall(r"\d+\.\d+", text)]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("mnist", ["--epochs", "3"]),
        ("word_language_model", []),
        ("word_language_model", ["--cell", "GRU", "--tied", "--epochs", "1"]),
        ("amp", []),
        ("gan", []),
        ("bert_classifier", ["--epochs", "1"]),
        ("gpt2_language_model", []),
    ],
)
def test_a_script_prints_the_same_placed(name: str, arguments: list[str]) -> None:
    if name in ("bert_classifier", "gpt2_language_model"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    path = SCRIPTS / f"{name}.py"
    expected = unplaced(path, *arguments)
    printed, run = placed(path, *arguments)
    if "GRU" in arguments:  # an ordinary step adds up its gates in another order than torch's own rule for taking it apart
        assert numbers(printed) == pytest.approx(numbers(expected), rel=1e-5)
    else:
        assert printed == expected
    assert len(expected.splitlines()) > 4
    assert run.code == 0
    assert [c.refusal for c in run.placed] == [""] * (2 if name == "gan" else 1)
    for calls in run.placed:
        assert all(c.verification.steps > 0 for c in calls.calls)
        assert sum(c.count for c in calls.calls) > 2
        assert min(len(order) for order in calls.calls[0].placement.result.timeline.device_order()) > 0


def test_a_script_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    path = SCRIPTS / "checkpoints.py"
    expected = unplaced(path, str(tmp_path / "a.pt"))
    printed, _ = placed(path, str(tmp_path / "b.pt"))
    assert printed == expected
    a, b = (torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt"))
    assert all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"])
    half, _ = placed(path, str(tmp_path / "c.pt"))
    first = unplaced(path, str(tmp_path / "half.pt"), "--epochs", "4")
    assert half == first
    checkpoint = torch.load(tmp_path / "c.pt", weights_only=True)
    assert checkpoint["epoch"] == 4
    again, _ = placed(path, str(tmp_path / "c.pt"), "--epochs", "6", "--resume", seed=1)
    assert again == unplaced(path, str(tmp_path / "a.pt"), "--epochs", "6", "--resume")
    assert again.startswith("going on at epoch 4\n4 ")


ODD = """
import random
import torch
from torch import nn
torch.manual_seed(0)
random.seed(0)
HEAD
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(20, 40)
        self.b = nn.Linear(40, 10)
    def forward(self, x):
        y = torch.relu(self.a(x))
        FORWARD
        return self.b(y)
model = Odd()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    loss = nn.functional.cross_entropy(model(torch.randn(8, 20)), torch.randint(10, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""


HEAD = "from itertools import cycle\nNUMBERS = cycle([1.0, 1.5])\nOUTSIDE = nn.Linear(40, 40)"


def test_what_differs_stops_or_goes_on_as_it_is(tmp_path: Path) -> None:
    path, reason = tmp_path / "odd.py", "differs from the unplaced one"
    path.write_text(ODD.replace("HEAD", HEAD).replace("FORWARD", "y = y * next(NUMBERS)"))
    with pytest.raises(ParityError, match=reason):
        placed(path)
    printed, run = placed(path, fallback=True)
    assert printed == unplaced(path)
    assert reason in run.placed[0].refusal
    assert reason in run.lines()[0]


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        ("y = y * 2 if y.sum().item() > 0 else y", "cannot be captured"),
        ("y = y + float(y.detach().numpy().mean())", "cannot be captured"),
        ("y = y + y[y > 0].mean()", "cannot be captured"),
        ("y = y * 2 if random.random() > 0.5 else y", "draws from Python's or NumPy's random"),
        ("self.n = getattr(self, 'n', 0) + 1; y = y * (1 + self.n % 2)", "changes attributes of the module (n)"),
        ("self.b.seen = self.b.seen + [y] if hasattr(self.b, 'seen') else []", "changes attributes of the module (b.seen)"),
        ("y = OUTSIDE(y)", "is to be trained and is no parameter"),
    ],
)
def test_what_cannot_be_placed_stops_or_goes_on_as_it_is(tmp_path: Path, forward: str, reason: str) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ODD.replace("HEAD", HEAD).replace("FORWARD", forward))
    with pytest.raises(CaptureError, match=re.escape(reason)):
        placed(path, num_devices=1)  # with more, parts of the module may be placed
    expected = unplaced(path)
    printed, run = placed(path, fallback=True, num_devices=1)
    assert printed == expected
    assert reason in run.placed[0].refusal
    assert reason in run.lines()[0]
    assert numbers(placed(path, fallback=True)[0]) == pytest.approx(numbers(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        ("y = y * 2 if y.sum().item() > 0 else y", "odd.py:LINE in forward: `y = y * 2 if y.sum().item() > 0 else y`"),
        ("y = y + float(y.detach().numpy().mean())", "odd.py:LINE in forward"),
        ("y = y + y[y > 0].mean()", "odd.py:LINE in forward"),
        ("y = y * 2 if random.random() > 0.5 else y", "draws from Python's or NumPy's random"),
        ("self.n = getattr(self, 'n', 0) + 1; y = y * (1 + self.n % 2)", "changes attributes of the module (n)"),
        ("self.b.seen = self.b.seen + [y] if hasattr(self.b, 'seen') else []", "changes attributes of the module (b.seen)"),
        ("y = OUTSIDE(y)", "is to be trained and is no parameter"),
    ],
)
def test_what_cannot_be_one_graph_is_placed_in_blocks(tmp_path: Path, forward: str, reason: str) -> None:
    """And it is said why."""
    path = tmp_path / "odd.py"
    path.write_text(ODD.replace("HEAD", HEAD).replace("FORWARD", forward))
    line = 1 + [text.strip() for text in path.read_text().splitlines()].index(forward)
    printed, run = placed(path, seed=1)
    assert numbers(printed) == pytest.approx(numbers(unplaced(path)), rel=1e-5)
    blocks = run.placed[0].other_way
    assert blocks.plan.result.splits
    assert blocks.verified == 2
    assert "2 blocks, 1 on cpu:0, 1 on cpu:1" in run.lines()[0]
    assert reason.replace("LINE", str(line)) in run.lines()[0]


def test_what_is_set_up_at_first_use_is_placed(tmp_path: Path) -> None:
    path = tmp_path / "lazy.py"
    lines = ["if not hasattr(self, 'table'):", "    self.table = torch.arange(40.0)", "y = y + self.table"]
    path.write_text(ODD.replace("HEAD", "").replace("FORWARD", "\n        ".join(lines)))
    printed, run = placed(path)
    assert printed == unplaced(path)
    assert sum(c.count for c in run.placed[0].calls) == 4


def test_a_module_that_changes_from_step_to_step_is_captured_anew(tmp_path: Path) -> None:
    path = tmp_path / "annealed.py"
    text = ODD.replace("HEAD", "").replace("FORWARD", "y = y / self.temperature")
    text = text.replace("super().__init__()", "super().__init__(); self.temperature = 1.0")
    path.write_text(text.replace("range(5):", "range(9):\n    model.temperature = 1.0 + step // 3"))
    printed, run = placed(path, verify_steps=1)
    assert printed == unplaced(path)
    assert len(run.placed[0].calls) == 3
    assert run.placed[0].unplaced == 2  # the first of each further one


def test_what_a_backward_pass_runs_once_more_is_not_placed_by_itself(tmp_path: Path) -> None:
    path, forward = tmp_path / "parts.py", "y = checkpoint(self.c, y, use_reentrant=False)"
    text = ODD.replace("HEAD", "from torch.utils.checkpoint import checkpoint").replace("FORWARD", forward)
    path.write_text(text.replace("super().__init__()", "super().__init__(); self.c = nn.Linear(40, 40)"))
    printed, run = placed(path, seed=1)
    assert numbers(printed) == pytest.approx(numbers(unplaced(path)), rel=1e-5)
    assert [type(calls.module).__name__ for calls in run.placed] == ["Odd"]


def test_what_forward_notes_of_itself_is_what_it_notes_unplaced(tmp_path: Path) -> None:
    path, note = tmp_path / "noting.py", "self.seen['n'] += 1; self.seen['means'].append(y.mean().item())"
    text = ODD.replace("HEAD", "").replace("FORWARD", note) + "print(model.seen)\n"
    path.write_text(text.replace("super().__init__()", "super().__init__(); self.seen = {'n': 0, 'means': []}"))
    printed, run = placed(path, seed=1)
    assert printed.splitlines()[-1] == unplaced(path).splitlines()[-1]
    assert "2 blocks" in run.lines()[0]


@pytest.mark.parametrize("compiled", ["torch.compile(Odd(), backend=compiler)", "Odd(); model.compile(backend=compiler)"])
@pytest.mark.parametrize("values", [False, True], ids=["one_graph", "blocks"])
def test_a_compiled_module_is_placed_as_it_is_written(tmp_path: Path, compiled: str, values: bool) -> None:
    """Not compared with what a compiler makes of it, which draws random numbers of its own."""
    path, as_written = tmp_path / "compiled.py", tmp_path / "as_written.py"
    forward = "y = nn.functional.dropout(y, 0.3, self.training)" + values * "; y = y * 2 if y.sum().item() > 0 else y"
    as_written.write_text(ODD.replace("HEAD", "").replace("FORWARD", forward))
    compiler = "def compiler(graph, _):\n    return lambda *tensors: [t * 2 for t in graph(*tensors)]\n"
    path.write_text(compiler + as_written.read_text().replace("Odd()", compiled, 1))
    printed, run = placed(path, seed=1)
    assert printed == unplaced(as_written)
    assert run.placed[0].refusal == ""
    assert (run.placed[0].other_way is not None) == values


def test_no_such_script() -> None:
    with pytest.raises(FileError, match="cannot read script"):
        placed(Path("nowhere.py"))
