"""A module placed in the caller's own loop, its batch in parts: the training is that of the whole batch, or it stays whole and that is
said."""

import copy
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

import baechi_ext
from baechi_ext.capture import torch_split
from baechi_ext.errors import CaptureError, OptionError
from baechi_runtime.cli.main import main
from baechi_runtime.torch.calls.parallelize import options_of
from tests.runtime.forked_workers import ForkedWorkers
from tests.torch_steps import Branches

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("one_thread"),
]
"""TorchDynamo reads it of what one fragment hands to the next one."""
QUICK = {"method": "random", "keep_placed": True, "cache": False, "verify_steps": 1000}


class Words(nn.Module):
    """A transformer with tied weights and dropout, whose loss ignores some labels; `table` has no batch, but its length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.last = nn.Linear(16, 20)
        self.last.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, table: Tensor, words: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += 1
        logits = self.last(self.layer(self.embedding(words)) @ (torch.eye(16) + table.mean()))
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0), logits


def trained(model: nn.Module, batches: list[int]) -> list[Tensor]:
    """Losses, then parameters and buffers, and the random state, of a training with its last batch smaller."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for i, size in enumerate(batches):
        generator = torch.Generator().manual_seed(i)
        words, labels = (torch.randint(20, (size, 4), generator=generator) for _ in range(2))
        labels[: size // 2] = 0
        loss, logits = model(torch.randn(6, 6, generator=generator), words, labels)
        (loss + logits.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(v.detach().clone() for v in model.state_dict().values()), torch.get_rng_state()]


@pytest.mark.parametrize(("parts", "sizes", "devices"), [(2, (3, 3), 2), (4, (2, 2, 1, 1), 3), ((4, 2), (4, 2), 2)])
def test_a_training_over_parts_is_that_of_the_whole_batch(parts: int | tuple[int, ...], sizes: tuple[int, ...], devices: int) -> None:
    torch.manual_seed(1)
    model = Words()
    placed = baechi_ext.parallelize(copy.deepcopy(model), **QUICK, devices=devices, microbatches=parts, strict=True)
    batches = [6, 6, 6, 6, 5, 5, 5]
    expected, found = trained(model, batches), trained(placed, batches)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    report = baechi_ext.report(placed)
    assert report.parts == sizes
    assert (report.placed_steps, report.verified.steps) == (5, 5)
    assert report.verified.max_rel_diff < 1e-5
    assert report.to_json()["microbatches"] == list(sizes)
    assert f"the batch in {len(sizes)} parts ({', '.join(map(str, sizes))} examples)" in report.line()
    baechi_ext.unplace(placed)


def test_the_batch_stays_whole_where_examples_are_mixed(capsys: pytest.CaptureFixture[str]) -> None:
    """BatchNorm: said once, with the layer and the line, and the call is placed all the same; an error with `strict`."""
    model = Branches()
    placed = baechi_ext.parallelize(model, **QUICK, microbatches=2)
    for i in range(3):
        torch.manual_seed(i)
        cross_entropy(placed(torch.randn(4, 3, 8, 8)), torch.randint(5, (4,))).backward()
    err = capsys.readouterr().err
    said = "stays whole: aten._native_batch_norm_legit_functional.default normalises over the whole batch (BatchNorm in training) in "
    assert err.count(said) == 1
    assert "torch_steps.py" in err
    report = baechi_ext.report(placed)
    assert (report.parts, report.placed_steps) == ((), 2)
    assert [note for note in report.notes if said in note]
    baechi_ext.unplace(placed)
    strict = baechi_ext.parallelize(model, **QUICK, microbatches=2, strict=True)
    with pytest.raises(CaptureError, match="the batch can't be split: aten._native_batch_norm"):
        for _ in range(2):
            strict(torch.randn(4, 3, 8, 8))
    baechi_ext.unplace(strict)


class Normed(nn.Module):
    """BatchNorm over pictures, and over rows of which each example has several."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(2, 4, 3), nn.Linear(4, 4)
        self.pictures, self.rows = nn.BatchNorm2d(4), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.pictures(self.left(x)).relu()).flatten(2).transpose(1, 2)
        return self.rows(self.right(y).flatten(0, 1)).relu().mean()


def by_hand(norm: nn.Module, sizes_of: Callable[[int], list[int]]) -> Callable[[Tensor], Tensor]:
    """BatchNorm over each part of the batch; `sizes_of` a number of rows."""
    ordinary = norm.forward

    def forward(x: Tensor) -> Tensor:
        first, *others = x.split(sizes_of(len(x)))
        found = [ordinary(first)]  # running values are its
        return torch.cat([*found, *(functional.batch_norm(o, None, None, norm.weight, norm.bias, True, 0.0, norm.eps) for o in others)])

    return forward


def normed_training(model: Normed, first_calls: Callable[[int], None]) -> list[Tensor]:
    """The same of a training whose last gradients are penalised; the first call of each size runs as it is."""
    torch.manual_seed(5)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    sizes = [6, 6, 6, 5, 5, 5]
    for i, size in enumerate(sizes):
        first_calls(0 if size not in sizes[:i] else size)
        loss = model(torch.randn(size, 2, 5, 5, generator=torch.Generator().manual_seed(i)))
        if i == 5:
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            loss = loss + sum(g.square().sum() for g in gradients)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(v.detach().clone() for v in model.state_dict().values()), torch.get_rng_state()]


def test_each_part_is_normalised_by_itself_where_that_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    model, batch = Normed(), 0

    def of_size(size: int) -> None:
        nonlocal batch
        batch = size

    def sizes_of(rows: int) -> list[int]:
        return [rows] if not batch else [(batch + 1) // 2 * rows // batch, batch // 2 * rows // batch]

    placed = baechi_ext.parallelize(copy.deepcopy(model), **QUICK, microbatches=2, batch_norm="per_part", strict=True)
    model.pictures.forward, model.rows.forward = by_hand(model.pictures, sizes_of), by_hand(model.rows, sizes_of)
    for a, b in zip(normed_training(model, of_size), normed_training(placed, lambda size: None), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    report = baechi_ext.report(placed)
    assert (report.parts, report.placed_steps, report.verified.steps) == ((3, 3), 4, 4)
    assert report.verified.max_rel_diff < report.verified.tolerance == 1e-4  # biases before BatchNorm have gradients of rounding alone
    assert [note for note in report.notes if "BatchNorm normalises each part of the batch by itself" in note]
    assert "stays whole" not in capsys.readouterr().err
    baechi_ext.unplace(placed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_what_is_allowed_follows_its_type(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is beyond that is refused: here the first part's gradients are left out of the sums."""

    def trained_under_autocast(model: nn.Module) -> nn.Module:
        for _ in range(3):
            with torch.autocast("cpu", dtype):
                loss = model(torch.randn(8, 16)).float().square().mean()
            loss.backward()
        return model

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    placed = trained_under_autocast(baechi_ext.parallelize(copy.deepcopy(model), **QUICK, microbatches=2, strict=True))
    verified = baechi_ext.report(placed).verified
    assert (verified.steps, verified.tolerance) == (2, 2.5 * torch.finfo(dtype).eps)
    assert 0 < verified.max_rel_diff < verified.tolerance
    monkeypatch.setattr(torch_split, "sum_in_pairs", lambda terms, add: terms[-1])
    wrong = trained_under_autocast(baechi_ext.parallelize(copy.deepcopy(model), **QUICK, microbatches=2))
    report = baechi_ext.report(wrong)
    assert "differs from the unplaced one (allowed" in report.refusal
    for module in (placed, wrong):
        baechi_ext.unplace(module)


def test_rows_that_torch_adds_up_in_16_bits_are_refused() -> None:
    """LayerNorm's gradients of bfloat16 tensors on a CPU: torch's own are further off for the whole batch than for its halves."""
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16)), torch.randn(64, 32, 8)

    def gradient(model: nn.Module, *parts: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        model.zero_grad()
        for part in parts:
            with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
                y = model(part)
            (y.float().exp().mean() / len(parts)).backward()
        return model[1].bias.grad.clone()

    exact = gradient(model, x, dtype=torch.float32)
    whole, halves = ((gradient(model, *parts) - exact).abs().max() / exact.abs().max() for parts in ((x,), x.chunk(2)))
    assert whole > 0.1
    assert whole > halves
    placed = baechi_ext.parallelize(model, **QUICK, microbatches=2)
    for _ in range(3):
        gradient(placed, x)
    refusal = baechi_ext.report(placed).refusal
    assert "gradient of 1.bias (" in refusal
    assert refusal.endswith("parts of a batch are added up in another order; --microbatches=1, or microbatches=1, places it whole")
    baechi_ext.unplace(placed)


class Looking(nn.Module):
    """Python looks at a value in the middle; one of its fragments mixes examples."""

    def __init__(self, mixing: bool) -> None:
        super().__init__()
        self.first, self.last, self.mixing = nn.Linear(6, 8), nn.Linear(8, 4), mixing

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        if y.sum() > 1e9:
            return y
        return self.last(y.softmax(0) if self.mixing else y).square().mean()


@pytest.mark.parametrize("mixing", [False, True])
def test_each_fragment_is_split_that_can_be(mixing: bool, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    model = Looking(mixing)
    placed = baechi_ext.parallelize(copy.deepcopy(model), **QUICK, microbatches=2)
    for i in range(3):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(i))
        for one in (model, placed):
            one(x).backward()
    for a, b in zip(model.parameters(), placed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)
    report, err = baechi_ext.report(placed), capsys.readouterr().err
    assert (report.parts, report.placed_steps, report.fragments) == ((3, 2), 2, 2)
    assert ("stays whole: in fragment 2 of 2 aten._softmax.default works along the batch" in err) == mixing
    baechi_ext.unplace(placed)


SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 30))

    def forward(self, words, labels):
        return nn.functional.cross_entropy(self.layers(self.embedding(words).mean(1)), labels, ignore_index=2)

torch.manual_seed(3)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(9):
    examples = 4 if step > 6 else 9
    loss = model(torch.randint(30, (examples, 5)), torch.randint(30, (examples,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item(), torch.rand(1).item())
"""


def test_a_script_on_worker_processes(tmp_path: Path, workers: ForkedWorkers, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses as unplaced, random numbers to the last digit; workers and threads come to the same numbers."""
    path = tmp_path / "loop.py"
    path.write_text(SCRIPT)
    runpy.run_path(str(path))
    alone = [float(word) for word in capsys.readouterr().out.split()]
    flags = ("train", "--placement_method=random", "--keep_placed", "--no_cache", "--comm_cost_coeffs=0.001,50", "--microbatches=2")
    assert main([*flags, "--strict", str(path)]) == 0
    threads = capsys.readouterr()
    assert "the batch in 2 parts (5, 4 examples)" in threads.err
    codes, out, err = workers.finish("baechi_on_processes", 2, *flags, "--strict", "--workers=process", "--timeout=120", str(path))
    assert codes == [0, 0], err
    assert "7 steps placed, verified 4 of 7" in err
    assert out == threads.out
    found = [float(word) for word in out.split()]
    assert found[::2] == pytest.approx(alone[::2], rel=1e-5)
    assert found[1::2] == alone[1::2]


WIDE = """
import torch
from torch import nn

torch.manual_seed(3)
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(3)], nn.NORM(256))
for step in range(3):
    model(torch.randn(1024, 256)).square().mean().backward()
"""


FLAGS = ("train", "--time_limit=0.2", "--keep_placed", "--no_cache", "--comm_cost_coeffs=0.00001,5", "--microbatches=auto", "--json")


@pytest.mark.parametrize("several", [False, True])
def test_auto_splits_a_batch_where_that_is_predicted_to_be_faster(
    tmp_path: Path, workers: ForkedWorkers, capsys: pytest.CaptureFixture[str], several: bool
) -> None:
    """Layers wait for each other, so the whole batch leaves a device idle; where BatchNorm is in it, it stays whole. Costs are measured, so
    where others took a core meanwhile nothing is gained, and it is planned once more."""
    path = tmp_path / "loop.py"

    def planned(flags: list[str]) -> dict[str, Any]:
        if several:
            out = workers.run("baechi_on_processes", 2, *flags, "--workers=process", "--timeout=120", str(path))
        else:
            assert main([*flags, str(path)]) == 0
            out = capsys.readouterr().out
        (found,) = json.loads(out[out.index("{") :])["modules"]
        return found

    for norm, allowed in (("LayerNorm", "whole"), ("BatchNorm1d", "whole"), ("BatchNorm1d", "per_part")):
        path.write_text(WIDE.replace("NORM", norm))
        tries = (planned([*FLAGS, f"--batch_norm={allowed}"]) for _ in range(3))
        found = next(tries) if (norm, allowed) == ("BatchNorm1d", "whole") else next((f for f in tries if f["microbatches"]), {})
        assert found["placed_steps"] == 2
        assert bool([note for note in found["notes"] if note.startswith("BatchNorm normalises each part")]) == (allowed == "per_part")
        if (norm, allowed) != ("BatchNorm1d", "whole"):
            assert found["microbatches"] == [512, 512]
            assert [note for note in found["notes"] if note.startswith("whole the batch is predicted to take")]
        else:
            assert found["microbatches"] == []
            assert [note for note in found["notes"] if "stays whole: aten._native_batch_norm" in note]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--microbatches=0", "argument --microbatches"),
        ("--batch_norm=mine", "argument --batch_norm"),
        ("--batch_norm=per_part --framework=tensorflow", "is for parts of a batch, and TensorFlow's steps are not split into any"),
    ],
)
def test_what_scripts_do_not_take(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, message: str) -> None:
    path = tmp_path / "loop.py"
    path.write_text("raise SystemExit(3)")
    assert main(["train", *flag.split(), str(path)]) == 2
    assert message in capsys.readouterr().err


def test_what_is_no_way_of_normalising() -> None:
    with pytest.raises(OptionError, match="batch_norm='mine' is neither 'whole' nor 'per_part'"):
        options_of({"batch_norm": "mine"}).request()


@pytest.mark.parametrize("given", [0, (), (2, 0), ("2",), True])
def test_what_are_no_parts(given: object) -> None:
    with pytest.raises(OptionError, match="is neither a number of parts nor their sizes"):
        options_of({"microbatches": given}).request()
