"""A module whose calls TorchDynamo traces for us is still the user's: whatever is done to it, it computes what it computes by itself."""

import copy
import gc
import io
import pickle
import re
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import baechi_ext
from baechi_ext.capture import torch_dynamo
from baechi_ext.errors import CaptureError
from baechi_runtime.report.call_report import CallReport
from baechi_runtime.torch.calls.call_report import report_of
from baechi_runtime.torch.calls.dynamo_backend import baechi, sessions
from baechi_runtime.torch.calls.session import SINGLE_OPS

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("one_thread"),
]
"""TorchDynamo reads it of what one fragment hands to the next one."""
OPTIONS = {"devices": 2, "method": "random", "strict": True, "keep_placed": True}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(self.norm(torch.tanh(self.a(x)))))


def pair(kind: Callable[[], nn.Module] = Net, **options: object) -> tuple[nn.Module, nn.Module]:
    """A module, and a placed one that is equal."""
    torch.manual_seed(2)
    model = kind()
    return model, baechi_ext.parallelize(copy.deepcopy(model), **{**OPTIONS, **options})


def train(model: nn.Module, steps: int = 6, before: Callable[[nn.Module, int], None] = lambda model, step: None) -> list[str]:
    """Every digit of what a training computes, and of the random numbers behind each step."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    said = []
    for step in range(steps):
        before(model, step)
        optimizer.zero_grad()
        loss = model(torch.randn(5, 6)).square().sum()
        loss.backward()
        optimizer.step()
        said.append(f"{loss.item():.17g} {torch.rand(1).item():.17g}")
    return [*said, *(f"{n} {v.double().sum().item():.17g}" for n, v in model.state_dict().items())]


def require_same(model: nn.Module, placed: nn.Module, placed_steps: int | None = None, **how: object) -> CallReport:
    assert train(placed, **how) == train(model, **how)
    report = baechi_ext.report(placed)
    assert placed_steps is None or report.placed_steps == placed_steps
    assert report.verified.max_rel_diff == 0
    return report


def test_dropout_draws_the_same_numbers() -> None:
    assert require_same(*pair(), placed_steps=5).refusal == ""


NAMED = pytest.mark.skipif(
    not entry_points(group="torch_dynamo_backends", name="baechi"), reason="the package was installed before it had the backend"
)
BACKENDS = pytest.mark.parametrize("backend", [baechi, pytest.param("baechi", marks=NAMED)], ids=["function", "name"])


@BACKENDS
@pytest.mark.parametrize("in_place", [False, True])
def test_the_backend(backend: Callable | str, in_place: bool) -> None:
    torch.manual_seed(2)
    model = Net()
    options = {**OPTIONS, "seed": 5 + 2 * in_place + (backend is baechi)}  # a session of its own
    known = sessions()
    compiled = copy.deepcopy(model)
    if in_place:
        compiled.compile(backend=backend, options=options, dynamic=False)
    else:
        compiled = torch.compile(compiled, backend=backend, options=options, dynamic=False)
    expected = [line.replace("_orig_mod.", "") for line in train(compiled)]
    assert expected == train(model)
    (session,) = [s for s in sessions() if s not in known]
    report = report_of(session)
    assert (report.placed_steps, report.plan.method, report.verified.max_rel_diff) == (5, "random", 0)


def test_what_the_backend_has_seen_once_ends_with_its_module() -> None:
    model = Net()
    compiled, x = torch.compile(model, backend=baechi, options={**OPTIONS, "seed": 9}, dynamic=False), torch.randn(5, 6)
    compiled(x).sum().backward()
    kept = [weakref.ref(x), *map(weakref.ref, model.parameters())]
    del model, compiled, x
    gc.collect()
    assert {one() for one in kept} == {None}


@NAMED
def test_the_backend_is_listed() -> None:
    assert "baechi" in torch.compiler.list_backends()


@BACKENDS
def test_the_backend_refuses_what_it_does_not_know(backend: Callable | str) -> None:
    with pytest.raises(Exception, match="unknown option 'device' of parallelize"):
        torch.compile(Net(), backend=backend, options={"device": 2})(torch.randn(5, 6))


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(self.norm, self.a(x), use_reentrant=False))


class Tries(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.tanh(self.a(x)))
        try:
            return torch.matmul(y, self.b.weight.T)
        except RuntimeError:
            return self.b(y)


class Windowed(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = getattr(self, "seen", None) or deque(maxlen=2)
        self.seen.append(len(self.seen) + 1)
        return self.b(self.norm(torch.tanh(self.a(x)))) * sum(self.seen)


@pytest.mark.parametrize(
    ("kind", "why"), [(Checkpointed, "torch.utils.checkpoint"), (Tries, "takes what an op raises"), (Windowed, "a deque of limited length")]
)
def test_what_the_backend_refuses_runs_as_it_is(kind: type[nn.Module], why: str, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(2)
    model = kind()
    compiled = torch.compile(copy.deepcopy(model), backend=baechi, options={**OPTIONS, "strict": False, "seed": 11}, dynamic=False)
    assert [line.replace("_orig_mod.", "") for line in train(compiled)] == train(model)
    said = capfd.readouterr().err
    assert re.search(f"^baechi: a part of the compiled model runs as it is: .*{why}", said, re.MULTILINE)
    assert "Error while creating guard" not in said
    torch.compiler.reset()  # a frame that is skipped once is skipped for good
    compiled = torch.compile(copy.deepcopy(model), backend=baechi, options={**OPTIONS, "strict": True}, dynamic=False)
    with pytest.raises(Exception, match=why):
        train(compiled)


def test_hooks_that_are_added_later_run() -> None:
    calls: dict[nn.Module, list[str]] = {}

    def add(model: nn.Module, step: int) -> None:
        seen = calls.setdefault(model, [])
        if step == 3:
            model.norm.register_forward_hook(lambda m, args, out: (seen.append("inner"), out * 2)[1])
            model.register_forward_hook(lambda m, args, out: seen.append(f"outer {out.sum().item():.17g}"))
            model.register_forward_pre_hook(lambda m, args: (seen.append("pre"), (args[0] + 1,))[1])
            model.a.weight.register_hook(lambda g: g * 3)
            model.b.register_full_backward_hook(lambda m, gi, go: seen.append(f"back {go[0].sum().item():.17g}"))

    model, placed = pair()
    report = require_same(model, placed, steps=8, before=add)
    assert report.placed_steps >= 2
    assert calls[model] == calls[placed]
    assert len(calls[model]) == 5 * 4


def test_hooks_of_all_modules_run() -> None:
    seen: list[str] = []
    model, placed = pair()
    train(placed, 3)
    train(model, 3)
    found = []
    for module in (model, placed):
        seen.clear()
        handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
        try:
            found.append((train(module, 3), list(seen)))
        finally:
            handle.remove()
    assert found[0] == found[1]
    assert len(found[0][1]) == 3 * 5
    assert train(placed, 2) == train(model, 2)
    assert any("hooks" in why for why in baechi_ext.report(placed).unplaced_calls)


def test_shapes_that_change() -> None:
    model, placed = pair()
    for module in (model, placed):
        torch.manual_seed(3)
        for size in (5, 5, 3, 3, 5, 3, 7):
            module(torch.randn(size, 6)).square().sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), placed.parameters(), strict=True))
    report = baechi_ext.report(placed)
    assert (report.shapes, report.placed_steps) == (2, 4)
    assert any("size mismatch" in line for line in report.recompiles)


def penalty(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (g.norm() - 1).square().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_gradients_of_gradients() -> None:
    """The generator and the buffers stay what they are by themselves."""
    model, placed = pair()
    for _ in range(4):
        x = torch.randn(5, 6, requires_grad=True)
        expected, random = penalty(model, x), torch.get_rng_state()
        found = penalty(placed, x)
        assert torch.equal(random, torch.get_rng_state())
        assert len(expected) == len(found) > 2
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(expected, found, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), placed.buffers(), strict=True))


def under_saved_tensor_hooks(model: nn.Module, x: Tensor) -> object:
    shapes: list = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (shapes.append(tuple(t.shape)), t)[1], lambda t: t):
        model(x).sum().backward()
    return shapes


def under_a_dispatch_mode(model: nn.Module, x: Tensor) -> object:
    with FlopCounterMode(display=False) as mode:
        model(x).sum().backward()
    return {str(op): flops for op, flops in mode.get_flop_counts()["Global"].items()}


def in_a_function_transform(model: nn.Module, x: Tensor) -> object:
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    found = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().sum())(parameters)
    return [found[n].double().sum().item() for n in parameters]


@pytest.mark.parametrize("surroundings", [under_saved_tensor_hooks, under_a_dispatch_mode, in_a_function_transform])
def test_what_sees_single_ops_sees_them(surroundings: Callable[[nn.Module, Tensor], object]) -> None:
    model, placed = pair(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    for module in (model, placed):
        train(module, 3)
    x = torch.randn(5, 6)
    for _ in range(3):
        expected = surroundings(model, x)
        assert expected
        assert surroundings(placed, x) == expected
    assert train(model, 3) == train(placed, 3)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(6, 8), nn.Linear(8, 4), 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x)) * self.scale
        if y.sum() > 1e9:  # the break
            return self.b(y) * 2
        return self.b(y)


def test_breaks_and_recompiles_are_said_with_file_and_line() -> None:
    def scale(model: nn.Module, step: int) -> None:
        model.scale = 1.0 if step < 4 else 2.0

    report = require_same(*pair(Breaks), steps=8, before=scale)
    line = 1 + next(i for i, text in enumerate(Path(__file__).read_text().splitlines()) if text.endswith("# the break"))
    assert any(f"test_dynamo.py:{line} in forward: `if y.sum() > 1e9:" in said for said in report.graph_breaks)
    assert any("scale" in said and "test_dynamo.py" in said for said in report.recompiles)
    assert report.fragments == 2
    assert report.placed_steps >= 6
    assert report.to_json()["graph_breaks"] == list(report.graph_breaks)



def test_no_more_steps_are_placed_than_made() -> None:
    model, placed = pair(Breaks)

    def scale(model: nn.Module, step: int) -> None:
        model.scale = 1.0 if step < 4 else 2.0

    # All but the first; in the fifth the fragment that reads the scale is traced anew, and runs as it is.
    assert require_same(model, placed, steps=8, before=scale).placed_steps == 7


def test_what_is_saved_and_copied_is_the_users_module() -> None:
    model, placed = pair()
    train(placed, 3), train(model, 3)
    assert type(placed) is Net
    assert list(placed.state_dict()) == list(model.state_dict())
    copied, unpickled, kept = copy.deepcopy(placed), pickle.loads(pickle.dumps(placed)), io.BytesIO()  # noqa: S301
    torch.save(placed, kept)
    kept.seek(0)
    loaded = torch.load(kept, weights_only=False)
    before = baechi_ext.report(placed).placed_steps
    expected = train(copy.deepcopy(model), 3)
    for other in (copied, unpickled, loaded):
        assert type(other) is Net
        assert train(other, 3) == expected
        with pytest.raises(Exception, match="is not placed"):
            baechi_ext.report(other)
    assert baechi_ext.report(placed).placed_steps == before
    assert train(placed, 3) == expected
    baechi_ext.parallelize(copied, **OPTIONS)


def test_threads_that_call_one_model() -> None:
    """Each call's gradients are those of its own arguments."""
    model, placed = pair(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    inputs = [torch.randn(5, 6) for _ in range(4)]
    expected = [torch.autograd.grad(model(x).square().sum(), list(model.parameters())) for x in inputs]
    wrong: list[object] = []

    def work(k: int) -> None:
        try:
            for _ in range(8):
                found = torch.autograd.grad(placed(inputs[k]).square().sum(), list(placed.parameters()))
                if not all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(expected[k], found, strict=True)):
                    wrong.append(k)
        except Exception as e:  # noqa: BLE001 - is told below
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert baechi_ext.report(placed).refusal == ""


class Outer(nn.Module):
    """Breaks the graph."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return self.inner(x) if y.sum().item() > 100 else 2 * y


def called_four_times(model: nn.Module, inputs: list[Tensor], found: list, began: threading.Barrier, k: int) -> None:
    began.wait()
    found += [(k, model(inputs[k])) for _ in range(4)]


def test_threads_that_call_models_for_the_first_time() -> None:
    """All at once, each model of all threads: no value is another one's, nothing goes on being traced, and later calls run placed."""
    for seed in range(4):
        layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        model, placed = pair(partial(Outer if seed % 2 else nn.Sequential, layers))
        inputs = [torch.randn(5, 6) for _ in range(3)]
        expected: list[Tensor] = [model(x) for x in inputs]
        found: list[tuple[int, Tensor]] = []
        call = partial(called_four_times, placed, inputs, found, threading.Barrier(len(inputs)))
        threads = [threading.Thread(target=call, args=(k,)) for k in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4 * len(inputs)
        assert all(torch.equal(y, expected[k]) for k, y in found)
        assert not torch.compiler.is_compiling()
        before = baechi_ext.report(placed).placed_steps
        for _ in range(3):
            placed(inputs[0]).sum().backward()
        assert baechi_ext.report(placed).placed_steps >= before + 2
        said = {"the first call of its kind", "another thread was tracing", "another thread was placing the call"}
        said.add(SINGLE_OPS)  # torch's trace of a backward pass turns anomaly detection on, in all threads
        assert set(baechi_ext.report(placed).unplaced_calls) <= said


def test_a_mark_of_tracing_that_nobody_takes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own traces in several threads leave it behind: one ends that began before another one, which ends after it."""
    model, placed = pair()
    ended = threading.Event()
    session = vars(torch.compiler).get("_compile_session_context")
    if session is None:
        pytest.skip(f"traces of torch {torch.__version__} leave no mark")
    first = session()
    first.__enter__()

    def second() -> None:
        with session():
            ended.wait()

    other = threading.Thread(target=second)
    other.start()
    while not torch.compiler.is_compiling():
        pass
    first.__exit__(None, None, None)
    ended.set()
    other.join()
    assert torch.compiler.is_compiling(), "torch takes the mark away by itself now; traced_elsewhere need not"
    train(placed, 2), train(model, 2)
    assert baechi_ext.report(placed).placed_steps == 0
    monkeypatch.setattr(torch_dynamo._Left, "seconds", 0.0)
    assert train(placed, 4) == train(model, 4)
    assert not torch.compiler.is_compiling()
    assert baechi_ext.report(placed).placed_steps > 0


def test_a_module_that_is_compiled_already_is_left_alone() -> None:
    model = Net()
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    with pytest.raises(CaptureError, match="compiles it itself"):
        baechi_ext.parallelize(model, **OPTIONS)
    assert model._compiled_call_impl is compiled
    with pytest.raises(CaptureError, match="compiles it itself"):
        baechi_ext.parallelize(torch.compile(Net(), backend="eager"), **OPTIONS)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.LSTM(6, 8, num_layers=3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x.unsqueeze(1))[0]).flatten(1)


class Contrast(nn.Module):
    """An encoder and one that follows it, whose weights are given other memory in each step, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.query = Net()
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for a, b in zip(self.query.parameters(), self.key.parameters(), strict=True):
            b.data = 0.9 * b.data + 0.1 * a.data

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        with torch.no_grad():
            self.follow()
            key = self.key(x)
        return nn.functional.normalize(query) @ nn.functional.normalize(key).t()


def test_weights_are_given_other_memory_by_python() -> None:
    report = require_same(*pair(Contrast), placed_steps=5)
    assert report.refusal == ""
    assert report.graph_breaks[0].startswith("a tensor gets other memory, at ")


def test_a_recurrent_layer_is_one_op() -> None:
    report = require_same(*pair(Recurrent), placed_steps=5)
    names = [op.op for op in report.plan.graph.ops if op.phase == "forward" and (op.module or "").startswith("cells")]
    assert 3 <= len(names) <= 6, names


class Recomputes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(self.middle, self.a(x), use_reentrant=False))


def test_what_recomputes_its_activations_runs_as_it_is() -> None:
    require_same(*pair(Recomputes, strict=False))


def test_a_call_in_evaluation_or_without_gradients_is_the_modules_own() -> None:
    model, placed = pair()
    train(placed, 3), train(model, 3)
    x = torch.randn(5, 6)
    before = baechi_ext.report(placed).placed_steps
    with torch.no_grad():
        torch.manual_seed(0)
        a = model(x)
        torch.manual_seed(0)
        assert torch.equal(a, placed(x))
    assert torch.equal(model.eval()(x), placed.eval()(x))
    assert baechi_ext.report(placed).placed_steps == before


def compiles_whole(module: nn.Module, x: Tensor) -> bool:
    """True if the user's own torch.compile takes it for one graph."""
    try:
        torch.compile(module, backend="eager", fullgraph=True)(x)
    except Exception:  # noqa: BLE001 - whatever TorchDynamo says
        return False
    return True


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_settings_for_our_traces_are_not_the_users(two_threads: None) -> None:
    """We have recurrent layers traced, and errors of a trace passed over."""
    before = [compiles_whole(kind(), torch.randn(5, 6)) for kind in (Recurrent, Breaks)]
    torch.compiler.reset()
    threads, trace = torch.get_num_threads(), sys.gettrace()
    require_same(*pair(Recurrent), placed_steps=5)
    assert (threads, trace) == (torch.get_num_threads(), sys.gettrace())
    torch.compiler.reset()
    assert [compiles_whole(kind(), torch.randn(5, 6)) for kind in (Recurrent, Breaks)] == before
    assert not before[1]
