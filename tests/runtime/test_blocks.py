"""Modules in blocks: the same numbers as the module as it is, blocks that run at the same time, and what can't be a block."""

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import baechi_ext
from baechi_ext.capture.torch_modules import find_blocks
from baechi_ext.errors import CaptureError, ExecutionError
from runtime.calls.blocks.backward import BlockBackward
from runtime.calls.blocks.pending import Pending
from runtime.calls.blocks.tape import Block, Tape
from runtime.calls.blocks.threads import BlockThreads
from runtime.torch_devices import cpu_devices


@pytest.fixture(scope="module")
def threads() -> BlockThreads:
    return BlockThreads(cpu_devices(2))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def layers(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)))


class Towers(nn.Module):
    """Independent branches, dropout in both, a residual that is added in place, a parameter of its own, and a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.a = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
        self.b = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.a(x) + self.b(x)
        y += x * self.scale
        if y.mean().item() > 0:
            y = y * 2
        return self.head(y.relu_())


class Chosen(nn.Module):
    """Shapes that depend on values, between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y[y > 0].unsqueeze(1)).mean(0, keepdim=True)


class Shared(nn.Module):
    """A block called several times, one that gives several tensors, a tied weight, and a tensor without a gradient between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.mix = nn.Linear(6, 6)
        self.pick = Pick()
        self.out = nn.Linear(6, 9, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.words((x[:, :5].abs() * 3).long().clamp(max=8))
        x, (hidden, _) = self.recurrent(x)
        for _ in range(1 + int(x.detach().numpy().mean() > 10) + 1):
            x = self.mix(x) + hidden.transpose(0, 1)
        best = self.pick(x)
        return {"logits": self.out(x.gather(1, best)), "again": nn.functional.linear(x, self.words.weight), "best": best, "name": "shared"}


class Pick(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(1, keepdim=True)


class Lottery(nn.Module):
    """Python's own random numbers decide."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = layers(6, 8, 8), layers(6, 8, 8), nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        first, second = (self.a(x), self.b(x))
        return self.head(first if random.random() + np.random.rand() > 1 else second)


class Rewrites(nn.Module):
    """Code that changes in place what blocks have read and handed out, behind their backs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = self.b(y.detach() * 2 + y)
        w = x.detach() * y.exp().clamp(max=9)
        u = self.c(w + 0)
        y = y.clone()
        v = self.head(torch.stack([z, u]).sum(0) + y)
        y.mul_(3)
        z.mul_(2)
        return v * float(y.mean().item() > -99) + y + z


class Reused(nn.Module):
    """A tensor that a block has read is changed in place; the block's backward does not need it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.sum, self.b = nn.Linear(6, 6), Total(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) * 1.5
        total = self.sum(y)
        y.mul_(3)
        return self.b(y) + total * float(total.item() > -1e9)


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


MODELS: dict[str, Callable[[], nn.Module]] = {"towers": Towers, "chosen": Chosen, "shared": Shared, "lottery": Lottery} | {
    "rewrites": Rewrites,
    "reused": Reused,
}


def sum_of(value: Any) -> Tensor:
    tensors = value.values() if isinstance(value, dict) else [value]
    return sum((t.sin() * torch.arange(t.numel()).reshape(t.shape)).sum() for t in tensors if isinstance(t, Tensor) and t.requires_grad)


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def as_it_is(module: nn.Module, x: Tensor) -> tuple[Any, list[Tensor | None]]:
    seeded(3)
    value = module(x)
    return value, torch.autograd.grad(sum_of(value), [*module.parameters(), x], allow_unused=True)


def in_blocks(threads: BlockThreads, module: nn.Module, x: Tensor, *, lazy: bool, runs: int = 3) -> tuple[Any, list[Tensor | None]]:
    """The last of several calls: from the second on, results are handed on before they are there. Every other block is on device 1."""
    watched = find_blocks(module, lambda: module(x), 2).watched
    blocks = [Block(w.name, w.module, i % 2, w.draws) for i, w in enumerate(watched)]
    assert len(blocks) >= 2
    for _ in range(runs):
        seeded(3)
        tape = Tape(threads, blocks, lazy=lazy)
        value = tape.run(module.forward, (x,), {})
        roots = [t for t in (value.values() if isinstance(value, dict) else [value]) if isinstance(t, Tensor) and t.requires_grad]
        ends = [root.detach().requires_grad_() for root in roots]
        stand_in = dict(zip(value, ends, strict=False)) if isinstance(value, dict) else ends[0]
        found = BlockBackward(tape, roots, torch.autograd.grad(sum_of(stand_in), ends), keep=False).run()
    arguments = {id(argument): id(own) for argument, own in tape.inputs}
    return value, [found.get(arguments.get(id(p), id(p))) for p in (*module.parameters(), x)]


@pytest.mark.parametrize(("name", "lazy"), [(name, lazy) for name in MODELS for lazy in (False, True) if (name, lazy) != ("reused", True)])
def test_the_numbers_are_those_of_the_module_as_it_is(threads: BlockThreads, name: str, lazy: bool) -> None:
    module = MODELS[name]()
    x = torch.randn(5, 6, requires_grad=True)
    expected, gradients = as_it_is(module, x)
    value, found = in_blocks(threads, module, x, lazy=lazy)
    as_dict = [v if isinstance(v, dict) else {"it": v} for v in (expected, value)]
    assert as_dict[0].keys() == as_dict[1].keys()
    for key, tensor in as_dict[0].items():
        assert torch.equal(tensor, as_dict[1][key]) if isinstance(tensor, Tensor) else tensor == as_dict[1][key]
    assert any(g is not None for g in gradients)
    for a, b in zip(gradients, found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(a.abs().max()))


class Meeting(nn.Module):
    """Passes, forward and backward, only where another one is there at the same time."""

    def __init__(self, forward: threading.Barrier, backward: threading.Barrier) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._barriers = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        self._barriers[0].wait(timeout=60)
        y = self.linear(x)
        y.register_hook(self._meet)
        return y

    def _meet(self, _: Tensor) -> None:
        self._barriers[1].wait(timeout=60)


class TwoMeetings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        barriers = threading.Barrier(2), threading.Barrier(2)
        self.a, self.b, self.head = Meeting(*barriers), Meeting(*barriers), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.a(x), self.b(x)]))


def test_independent_branches_run_at_the_same_time(threads: BlockThreads) -> None:
    """Forward and backward; one after the other, no barrier would open."""
    module = TwoMeetings()
    blocks = [Block("a", module.a, 0), Block("b", module.b, 1), Block("head", module.head, 0)]
    earlier = Tape(threads, blocks[2:])  # the shape of results is known from earlier calls
    earlier.run(module.head, (torch.randn(2, 4),), {})
    for block in blocks:
        block.shape_of_results = blocks[2].shape_of_results
    tape = Tape(threads, blocks)
    value = tape.run(module.forward, (torch.randn(3, 4),), {})
    assert [call.block.name for call in tape.calls] == ["a", "b", "head"]
    found = BlockBackward(tape, [value], [torch.ones_like(value)], keep=False).run()
    assert len(found) == len(list(module.parameters()))


class Failing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError("here")


def test_what_a_block_raises_is_raised(threads: BlockThreads) -> None:
    module = nn.Sequential(nn.Linear(4, 4), Failing(4, 4), nn.Linear(4, 4))
    blocks = [Block(name, part, i % 2) for i, (name, part) in enumerate(module.named_children())]
    with pytest.raises(ZeroDivisionError, match="here"):
        Tape(threads, blocks).run(module.forward, (torch.randn(2, 4),), {})
    assert all("forward" not in vars(part) for part in module.modules())


def test_a_backward_pass_can_come_again(threads: BlockThreads) -> None:
    module = layers(4, 5, 3)
    tape = Tape(threads, [Block(name, part, i % 2) for i, (name, part) in enumerate(module.named_children())])
    value = tape.run(module.forward, (torch.randn(2, 4),), {})
    first = BlockBackward(tape, [value], [torch.ones_like(value)], keep=True).run()
    second = BlockBackward(tape, [value], [torch.ones_like(value)], keep=False).run()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        BlockBackward(tape, [value], [torch.ones_like(value)], keep=False).run()


def test_a_pending_tensor_does_as_the_tensor() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    asked = []
    pending = Pending(lambda: asked.append(1) or tensor, None)
    assert not asked
    assert torch.equal(pending + 1, tensor + 1)
    assert torch.equal(2 - pending, 2 - tensor)
    assert torch.equal(tensor @ Pending(lambda: tensor.T, None), tensor @ tensor.T)
    assert torch.equal(torch.cat([pending, tensor]), torch.cat([tensor, tensor]))
    assert torch.equal(nn.functional.relu(-pending), torch.relu(-tensor))
    assert torch.equal(pending[1], tensor[1])
    assert pending.shape == (2, 3)
    assert (len(pending), bool(pending.sum() > 1), [row.tolist() for row in pending]) == (2, True, tensor.tolist())
    assert np.array_equal(np.asarray(pending), tensor.numpy())
    assert repr(pending) == repr(tensor)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Strange(nn.Module):
    def forward(self, x: Any) -> Tensor:
        return x.pair[0]


class Unfit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.in_place, self.strange = InPlace(), Strange()

    def forward(self, x: Tensor) -> Tensor:
        class Pair:
            pair = (self.in_place(self.first(x)), 1)

        y = self.strange(Pair())
        with torch.no_grad():
            z = self.frozen(y)
        return self.last(y + z)


def test_what_cannot_be_a_block_says_why() -> None:
    module = Unfit()
    found = find_blocks(module, lambda: module(torch.randn(2, 4)), 2)
    assert [w.name for w in found.watched] == ["first", "last"]
    assert set(found.left_out) == {
        "in_place: it changes an argument in place",
        "strange: it takes a Pair",
        "frozen: it is called under no_grad",
    }
    assert 0 < found.covered < 1


def test_unfit_blocks_are_taken_apart_or_left_out(threads: BlockThreads) -> None:
    """A Sequential with an unfit submodule stays whole; one that is unfit itself is taken apart."""
    module = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), nn.Linear(4, 4))
    assert [w.name for w in find_blocks(module, lambda: module(torch.randn(2, 4)), 2).watched] == ["0", "1"]


# In the caller's own loop


def trained(module: nn.Module, steps: int = 5) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        seeded(step)
        x = torch.randn(5, 6)
        optimizer.zero_grad()
        loss = sum_of(module(x)) / 1000
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_training_in_blocks(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Round robin splits what is too small to be worth it."""
    torch.manual_seed(5)
    expected_module = MODELS[name]()
    torch.manual_seed(5)
    module = MODELS[name]()
    expected = trained(expected_module)
    placed = baechi_ext.parallelize(module, devices=2, method="round_robin")
    assert trained(placed) == pytest.approx(expected, rel=1e-5)
    other = placed._placed.other_way
    assert other.plan.result.splits
    assert other.verified == 2
    assert other._lazy is (name != "reused")
    for key, value in expected_module.state_dict().items():
        torch.testing.assert_close(module.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    if name == "lottery":
        assert module.calls == expected_module.calls
    said = capfd.readouterr().err
    assert f"baechi: {type(module).__name__}: {len(other.plan.blocks)} blocks, " in said
    assert "not op by op, since " in said
    assert str(placed.report()) in said.replace("baechi: ", "")


def test_training_in_blocks_under_autocast() -> None:
    def under_autocast(module: nn.Module) -> list[float]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return trained(module)

    torch.manual_seed(5)
    expected = under_autocast(Towers())
    torch.manual_seed(5)
    placed = baechi_ext.parallelize(Towers(), devices=2, method="round_robin")
    assert under_autocast(placed) == pytest.approx(expected, rel=2e-2, abs=5e-3)  # sums of numbers of 8 bits
    assert placed._placed.other_way.plan.result.splits
    assert placed._placed.other_way.verified == 2


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.only(x)
        return y * y.sum().item()  # the line


def test_where_neither_works_the_line_is_named() -> None:
    placed = baechi_ext.parallelize(NoBlocks(), devices=2, method="round_robin")
    line = r"test_blocks.py:\d+ in forward: `return y \* y.sum\(\).item\(\)  # the line`"
    with pytest.raises(CaptureError, match=rf"{line}.*no two submodules"):
        trained(placed)


def test_with_fallback_it_runs_as_it_is() -> None:
    torch.manual_seed(5)
    expected = trained(NoBlocks())
    torch.manual_seed(5)
    placed = baechi_ext.parallelize(NoBlocks(), devices=2, method="round_robin", fallback=True)
    assert trained(placed) == expected
    assert "no two submodules" in placed._placed.other_way.line()


class Wrong(nn.Module):
    """Its blocks exchange a tensor behind the back of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Keeps(), Uses()
        self.second.__dict__["other"] = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * float(x.sum().item() > -1e9)


class Keeps(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["kept"] = [super().forward(x)]
        return self.kept[0].detach()


class Uses(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.other.kept[0])


def test_graphs_that_reach_into_one_another_are_followed() -> None:
    """The second block's graph goes on into the first one's: what it ends in are parameters all the same."""
    torch.manual_seed(5)
    expected = trained(Wrong())
    torch.manual_seed(5)
    placed = baechi_ext.parallelize(Wrong(), devices=2, method="round_robin")
    assert trained(placed) == pytest.approx(expected, rel=1e-5)


class Asks(nn.Module):
    """Code between blocks that looks at the type of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if not isinstance(y, Tensor):
            raise TypeError("no tensor")
        return self.b(y * float(y.sum().item() > -1e9))


def test_code_that_wants_real_tensors_waits_for_them() -> None:
    torch.manual_seed(5)
    expected = trained(Asks())
    torch.manual_seed(5)
    placed = baechi_ext.parallelize(Asks(), devices=2, method="round_robin")
    assert trained(placed) == pytest.approx(expected, rel=1e-5)
    assert placed._placed.other_way.plan.result.splits
    assert not placed._placed.other_way.refusal


class Endless(nn.Linear):
    def __init__(self, until: threading.Event, *, backward: bool) -> None:
        super().__init__(4, 4)
        self._until, self._backward = until, backward

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self._backward:
            y.register_hook(lambda _: self._until.wait(60) and None)
        else:
            self._until.wait(60)
        return y


@pytest.mark.parametrize("backward", [False, True])
def test_a_block_that_does_not_end_is_given_up(backward: bool) -> None:
    until = threading.Event()
    module = nn.Sequential(nn.Linear(4, 4), Endless(until, backward=backward), nn.Linear(4, 4))
    threads = BlockThreads(cpu_devices(2), timeout_seconds=0.5)
    blocks = [Block(name, part, i % 2) for i, (name, part) in enumerate(module.named_children())]

    def both() -> None:
        tape = Tape(threads, blocks)
        value = tape.run(module.forward, (torch.randn(2, 4),), {})
        BlockBackward(tape, [value], [torch.ones_like(value)], keep=False).run()

    with pytest.raises(ExecutionError, match="within 0.5 s; raise the time-out"):
        both()
    until.set()
