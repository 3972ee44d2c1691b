"""A script's training call that is compared: its forward and backward pass, as it is and placed, and if both give the same."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from baechi_ext.errors import CaptureError, ParityError
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.measure.comparator import compare
from baechi_runtime.measure.parity_result import Parity, require_parity
from baechi_runtime.torch.calls.call_step import Given, TrainingCall, captured_call, leaf_of, tolerance_of
from baechi_runtime.torch.calls.placed_function import LoadedFragment
from baechi_runtime.torch.calls.verify import RandomState, restore

Results = dict[str, Tensor]
"""Outputs and gradients, by name."""
Run = Callable[..., Sequence[Tensor]]


@dataclass
class NotedFragment:
    """A fragment that runs as it is, and what it was given and returned when it ran last."""

    graph: fx.GraphModule
    log: "list[NotedFragment]"
    args: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()

    def __call__(self, *args: Tensor) -> Sequence[Tensor]:
        values: Sequence[Tensor] = self.graph(*args)
        self.log.append(NotedFragment(self.graph, self.log, args, tuple(values)))
        return values


def capture_noted(log: Sequence[NotedFragment], module: nn.Module, request: TrainRequest) -> TrainingCall:
    """The call in which these fragments ran. Raises CaptureError if none of them trains, or one can't be captured."""
    trained = [n for n in log if any(isinstance(v, Tensor) and v.requires_grad for v in n.values)]
    if not trained:
        raise CaptureError(f"a call of {type(module).__name__} can't be traced: TorchDynamo found no graph of ops in it")
    made: dict[int, tuple[int, int]] = {}
    given: list[Given] = []
    for number, noted in enumerate(trained):
        links = {i: made[id(a)] for i, a in enumerate(noted.args) if id(a) in made}
        given.append((noted.graph, tuple(leaf_of(a) if i not in links else a for i, a in enumerate(noted.args)), links))
        made |= {id(v): (number, i) for i, v in enumerate(noted.values)}
    return captured_call(request, given, type(module).__name__, module)


class ComparedCall:
    """The script's call and its backward pass, as it is and placed, from gradients of its outputs that are the same for all. The gradients
    that come out are handed over, not added to those of the parameters.
    """

    def __init__(self, call: TrainingCall) -> None:
        self.call = call
        self._args = [tuple(a.detach().requires_grad_(a.requires_grad) for a in f.args) for f in call.fragments]
        self._written = {(k, i): self._args[k][i].detach().clone() for k, p in enumerate(call.captured.fragments) for i in p.written}
        self._random = RandomState()
        self._tolerance = tolerance_of(frozenset().union(*(part.dtypes for part in call.captured.fragments)), call.step.live)
        self._tangents: dict[tuple[int, int], Tensor] = {}
        outputs = self._forward([f.module for f in call.fragments])
        self._tangents = _tangents({key: v for key, v in outputs.items() if v.requires_grad and v.dtype.is_floating_point})
        self._expected = self._with_gradients(outputs)
        self._after = RandomState()
        self._new_values = {key: self._args[key[0]][key[1]].detach().clone() for key in self._written}

    def plain(self) -> Results:
        """Run the call as it is."""
        return self._with_gradients(self._forward([f.module for f in self.call.fragments]))

    def placed(self, loaded: Sequence[LoadedFragment]) -> Results:
        return self._with_gradients(self._forward([lambda *args, one=one: one.run(args) for one in loaded]))

    def _forward(self, runs: Sequence[Run]) -> dict[tuple[int, int], Tensor]:
        made: dict[tuple[int, int], Tensor] = {}
        for k, (fragment, run) in enumerate(zip(self.call.fragments, runs, strict=True)):
            args = [made.get(fragment.links[i], a) if i in fragment.links else a for i, a in enumerate(self._args[k])]
            made |= {(k, i): v for i, v in enumerate(run(*args))}
        return made

    def _with_gradients(self, outputs: dict[tuple[int, int], Tensor]) -> Results:
        sources: dict[str, Tensor] = {}
        for k, (fragment, part) in enumerate(zip(self.call.fragments, self.call.captured.fragments, strict=True)):
            own = ((i, self._args[k][i]) for i in part.reached_by if i not in fragment.links and self._args[k][i].requires_grad)
            sources |= {_title(k, part.state.get(i, f"argument {i}")): value for i, value in own}
        roots = [(outputs[key], t) for key, t in self._tangents.items()]
        values = torch.autograd.grad([r for r, _ in roots], list(sources.values()), [t for _, t in roots], allow_unused=True)
        gradients = {f"gradient of {n}": g for n, g in zip(sources, values, strict=True) if g is not None}
        return {f"output {i} of fragment {k}": v.detach() for (k, i), v in outputs.items()} | gradients

    def rewind(self) -> None:
        """Put buffers and random state back to what they were before the call."""
        for k, args in enumerate(self._args):
            restore(args, {i: v for (f, i), v in self._written.items() if f == k}, self._random)

    def parity(self, loaded: Sequence[LoadedFragment], *, relaxed: bool) -> Parity:
        """The parity of outputs, gradients and buffers with those of the call as it is, from the same state; unless random numbers are
        `relaxed`, raises ParityError where these or the random state differ."""
        self.rewind()
        found = self.placed(loaded)
        written = {f"new value of {self._name(key)}": value for key, value in self._new_values.items()}
        now = {f"new value of {self._name(key)}": self._args[key[0]][key[1]] for key in self._written}
        parity = compare(self._expected | written, found | now, self._tolerance)
        if not relaxed:
            require_parity(parity)
            if not self._after.is_now():
                raise ParityError("the placed call drew other random numbers than the unplaced one")
        return parity

    def _name(self, key: tuple[int, int]) -> str:
        return self.call.captured.fragments[key[0]].state.get(key[1], f"argument {key[1]} of fragment {key[0]}")


def _title(fragment: int, name: str) -> str:
    return f"{name} in fragment {fragment}" if fragment else name


def _tangents(outputs: Mapping[tuple[int, int], Tensor]) -> dict[tuple[int, int], Tensor]:
    """Gradients to begin with: 1 for a scalar, such as a loss; random numbers for other outputs, as ones give many ops a gradient of 0."""
    generator = torch.Generator().manual_seed(0)

    def tangent(output: Tensor) -> Tensor:
        if output.dim() == 0:
            return torch.ones_like(output)
        return torch.randn(output.shape, generator=generator, dtype=output.dtype).to(output.device)

    return {key: tangent(value.detach()) for key, value in outputs.items()}
