"""Calls of a user's own module with a CUDA graph for each pass, on real devices or pretended ones (make test-cuda-stub): what a training
loop sees is what it sees unplaced."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import baechi_ext
from baechi_ext.errors import ParityError
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.torch.calls import capturing, graphed, verify
from baechi_runtime.torch.calls.graphed import GraphedFragment
from baechi_runtime.torch.calls.module_call import call_of
from baechi_runtime.torch.lowering.runnable import with_seeds_on_host
from baechi_runtime.torch.streams import step_graph
from tests.runtime.graphed_loops import Net, accumulated, batches, fragment_of, ordinary, pair, siamese, train, twice, with_input_gradient

found = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(found < 1, reason="needs a CUDA device")]
two = pytest.param(["cuda:0", "cuda:1"], id="two GPUs", marks=pytest.mark.skipif(found < 2, reason="needs two CUDA devices"))
devices = pytest.mark.parametrize("devices", [pytest.param(["cuda:0"], id="one GPU"), two])


@pytest.fixture(autouse=True)
def _traced_anew() -> None:
    """TorchDynamo traces the code of one module only so often."""
    torch.compiler.reset()


def same(plain: nn.Module, placed: nn.Module) -> None:
    for (name, a), b in zip(plain.state_dict().items(), placed.state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


LOOPS = [ordinary, accumulated, siamese, twice, with_input_gradient]


@devices
@pytest.mark.parametrize("loop", LOOPS, ids=[loop.__name__ for loop in LOOPS])
def test_loops(devices: list[str], loop: Callable[..., Any]) -> None:
    plain, placed = pair(devices)
    assert train(placed, loop) == pytest.approx(train(plain, loop), rel=1e-4)
    same(plain, placed)
    fragment = fragment_of(placed)
    assert fragment.why_not == ""
    assert fragment.note == "CUDA graphs of its passes"
    assert baechi_ext.report(placed).verified.max_rel_diff < 1e-4


@devices
def test_random_numbers_are_those_of_the_unplaced_module(devices: list[str]) -> None:
    plain, placed = pair(devices, drops=True)
    assert train(placed, ordinary) == pytest.approx(train(plain, ordinary), rel=1e-4)
    assert fragment_of(placed).note == "CUDA graphs of its passes"


@devices
def test_what_was_returned_stays_as_it_is(devices: list[str]) -> None:
    _, placed = pair(devices)
    (x, y), (other, _) = batches(2)
    for _ in range(5):
        functional.cross_entropy(placed(x), y).backward()
    output = placed(x)
    before = output.detach().clone()
    output.sum().backward()
    gradients = [p.grad for p in placed.parameters()]
    copies = [g.clone() for g in gradients]
    placed.zero_grad()
    placed(other).sum().backward()
    assert torch.equal(output, before)
    assert all(torch.equal(g, c) for g, c in zip(gradients, copies, strict=True))


def test_parameters_that_move_are_captured_anew_and_given_up_in_the_end() -> None:
    plain, placed = pair(["cuda:0"])
    torch.manual_seed(5)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, placed)]
    for i, batch in enumerate(batches(14)):
        if i in (5, 7, 9, 11):
            for p in placed.parameters():
                p.data = p.data.clone()
        losses = [ordinary(m, o, batch) for m, o in zip((plain, placed), optimizers, strict=True)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    same(plain, placed)
    assert fragment_of(placed).note == "no CUDA graphs of its passes: its parameters move"


CALLS: list[float] = []
SCALE = [1.0]


@torch.library.custom_op("graphed_calls::bounded", mutates_args=())
def bounded(x: torch.Tensor) -> torch.Tensor:
    """The host waits for a value, which no graph can have, and Python has a part in it."""
    CALLS.append(SCALE[0])
    return SCALE[0] * x / max(1.0, x.abs().max().item())


bounded.register_fake(torch.empty_like)
bounded.register_autograd(lambda context, gradient: gradient)


class Bounded(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(bounded(x))


def test_the_python_of_others_runs_in_every_call() -> None:
    """A graph would run its kernels alone, with what the first call had found in Python."""
    options = {"devices": ["cuda:0"], "method": "contiguous", "keep_placed": True, "strict": True, "cache": False}
    placed = baechi_ext.parallelize(Bounded().to("cuda:0"), **options)
    CALLS.clear()
    for i, (x, y) in enumerate(batches(10)):
        SCALE[0] = 1.0 + i
        functional.cross_entropy(placed(x), y).backward()
    assert fragment_of(placed).note.startswith("no CUDA graphs of its passes: it calls ops of others")
    assert list(dict.fromkeys(CALLS)) == [1.0 + i for i in range(10)]


def test_seeds_are_read_on_the_host_outside_of_graphs_alone() -> None:
    seen: list[tuple[str, ...]] = []

    def attention(*args: torch.Tensor, scale: float) -> None:
        seen.append(tuple(value.device.type for value in args))

    call, value = with_seeds_on_host(attention, (1, 2)), torch.ones(1, device="cuda:0")
    call(value, value, value.cpu(), scale=0.5)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        call(value, value + 1, value, scale=0.5)
    assert seen == [("cuda", "cpu", "cpu"), ("cuda", "cuda", "cuda")]


def test_after_a_capture_that_cuda_refused_all_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers are drawn as before, and memory that several streams use comes back: torch's generators and allocator took the capture
    to go on."""
    monkeypatch.setattr(graphed, "FOREIGN", "")
    torch.manual_seed(0)
    plain = Bounded(drops=True).to("cuda:0")
    options = {"devices": ["cuda:0"], "method": "contiguous", "keep_placed": True, "strict": True, "cache": False}
    placed = baechi_ext.parallelize(copy.deepcopy(plain), **options)
    assert train(placed, ordinary) == pytest.approx(train(plain, ordinary), rel=1e-4)
    assert fragment_of(placed).note.startswith("no CUDA graphs of its passes: ")
    assert fragment_of(placed)._graphs is None
    functional.dropout(torch.ones(8, device="cuda:0"), 0.5)
    held = []
    for _ in range(20):
        value, stream = torch.ones(1 << 20, device="cuda:0"), torch.cuda.Stream()
        value.record_stream(stream)
        del value
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_reserved())
    assert held[-1] == held[3]


def test_steps_of_the_warm_up_are_not_held_against_placing() -> None:
    """Ops are timed one by one in these, and graphs made: plain steps were taken to be faster for good."""
    torch.manual_seed(0)
    options = {"devices": ["cuda:0"], "method": "contiguous", "verify_steps": 1, "strict": True, "cache": False}
    placed = baechi_ext.parallelize(Net().to("cuda:0"), **options)
    timed = {}
    for x, y in batches(20):
        functional.cross_entropy(placed(x), y).backward()
        for group in call_of(placed).session.groups:  # type: ignore[union-attr]
            timed[group.members[0].count] = len(group.turns.placed_us)
    assert timed[4] == 0 < timed[max(timed)]  # the fourth makes the graphs


def test_graphs_leave_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graph, "MOST_MEMORY", 1e-9)
    plain, placed = pair(["cuda:0"])
    assert train(placed, ordinary) == pytest.approx(train(plain, ordinary), rel=1e-4)
    why = "no CUDA graphs of its passes: it would keep .* of the .* that are free on cuda:0, more than 0%"
    assert re.fullmatch(why, fragment_of(placed).note)


@pytest.mark.parametrize("at", [0, 1], ids=["forward", "backward"])
def test_without_memory_for_what_a_caller_gets_passes_run_op_by_op(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, placed = pair(["cuda:0"])
    replayed, calls, empty_like = GraphedFragment._replayed, [], torch.empty_like

    def empty(*_: Any, **__: Any) -> torch.Tensor:
        monkeypatch.setattr(torch, "empty_like", empty_like)
        raise torch.OutOfMemoryError("no more")

    def short(self: GraphedFragment, *given: Any) -> Any:
        calls.append(None)
        if len(calls) == 5 + at:
            monkeypatch.setattr(torch, "empty_like", empty)
        return replayed(self, *given)

    monkeypatch.setattr(GraphedFragment, "_replayed", short)
    assert train(placed, ordinary) == pytest.approx(train(plain, ordinary), rel=1e-4)
    same(plain, placed)
    assert len(calls) == 5 + at
    assert fragment_of(placed).note == "no CUDA graphs of its passes: there is no memory for copies of what they compute"


def test_parameters_on_the_host_are_no_part_of_a_graph() -> None:
    torch.manual_seed(0)
    options = {"method": "contiguous", "keep_placed": True, "cache": False, "verify_steps": 0}
    module = baechi_ext.parallelize(Net(), devices=["cuda:0"], **options)  # a GPU rounds otherwise
    for x, y in batches(6):
        functional.cross_entropy(module(x.cpu()), y.cpu()).backward()
    assert fragment_of(module).note == "no CUDA graphs of its passes: its parameters are on cpu"


@pytest.mark.parametrize("drops", [False, True])
def test_other_kernels_are_held_against_double_precision(*, drops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where results differ by more than is allowed, neither may be much farther from exact ones; a wrong one is."""
    monkeypatch.setattr(capturing, "FULL_PRECISION", -1.0)  # a real GPU's results are the same to the last bit
    monkeypatch.setitem(capturing.TOLERANCE, "cuda", -1.0)
    asked = []
    run = verify._Doubles._run
    monkeypatch.setattr(verify._Doubles, "_run", lambda self: asked.append(found := run(self)) or found)
    plain, placed = pair(["cuda:0"], drops=drops)
    assert train(placed, ordinary) == pytest.approx(train(plain, ordinary), rel=1e-4)
    assert asked
    assert None not in asked
    assert baechi_ext.report(placed).verified.steps >= 3

    fragment = fragment_of(placed)
    backward = fragment.backward
    monkeypatch.setattr(fragment, "backward", lambda *given: off_by(1.01, *backward(*given)))
    verification = call_of(placed).session.groups[0].members[0].verification  # type: ignore[union-attr]
    assert verification.tolerance < 0.0 < verification.allowed
    monkeypatch.setattr(verification, "always", 100)
    x, y = next(batches(1))
    with pytest.raises(ParityError, match="the placed step differs from the unplaced one"):
        functional.cross_entropy(placed(x), y).backward()


def off_by(factor: float, gradients: dict[int, torch.Tensor], times: StepTimes) -> tuple[dict[int, torch.Tensor], StepTimes]:
    return {name: gradient * factor for name, gradient in gradients.items()}, times


def test_a_changed_weight_between_the_passes_is_an_error_as_unplaced() -> None:
    _, placed = pair(["cuda:0"])
    for x, y in batches(6):
        functional.cross_entropy(placed(x), y).backward()
    x, y = next(batches(1))
    x.requires_grad_()
    loss = functional.cross_entropy(placed(x), y)
    with torch.no_grad():
        placed.out.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
