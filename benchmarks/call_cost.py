"""The cost of a placed call of a user's module beside what its devices do: TorchDynamo's guards, the session, autograd's function.

    python -m benchmarks.call_cost [--rounds=200] --out=benchmarks/results/call_cost.json

Each module is placed on two workers and stays placed. `cost_us` is of calls whose programs are left out, one after the other: all that
stands between a user's call and the devices. `in_a_loop_us` is of whole training steps: a forward call's wall time less that of its
programs, which have filled the caches with other things meanwhile. The forward call of the same module as it is, on one thread, stands
beside them.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import baechi_ext
from baechi_runtime.torch.calls.module_call import call_of
from benchmarks.runner import Benchmark, Row, in_turn, table, timed


class Layers(nn.Module):
    """`count` linear layers with a ReLU behind each, in a module of the caller's own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x).relu()
        return x


def convolutions() -> nn.Module:
    """Twenty convolutions with batch norms, whose averages are buffers that every call changes."""
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(20)))


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "10 linear layers": (lambda: Layers(10), (16, 64)),
    "75 linear layers": (lambda: Layers(75), (16, 64)),
    "20 convolutions with batch norm": (convolutions, (2, 8, 16, 16)),
}


def cost_of(name: str, rounds: int) -> Row:
    """Medians in microseconds over so many training calls, which take turns with plain ones, and over as many without their programs."""
    make, shape = MODULES[name]
    torch.manual_seed(0)
    model, plain = make(), make()
    baechi_ext.parallelize(model, devices=2, method="m_etf", keep_placed=True, verify_steps=0, cache=False)
    x = torch.randn(shape)
    for _ in range(5):
        model(x).sum().backward()
    (fragment,) = (f for f in call_of(model).session.fragments if f.loaded is not None)  # type: ignore[union-attr]
    placed = fragment.loaded.placed
    run, results = placed.forward, []

    def kept(args: Sequence[Tensor]) -> Any:
        results.append(run(args))
        return results[-1]

    def repeated(_: Sequence[Tensor]) -> Any:
        outputs, slots, times = results[-1]
        return [o.detach() for o in outputs], slots, times

    def dropped() -> None:
        model(x)

    def trained() -> tuple[float, float]:
        out, took = timed(lambda: model(x))
        programs_us = results[-1][2].wall_us
        results[:-1] = []
        out.sum().backward()
        return 1e6 * took["seconds"], 1e6 * took["seconds"] - programs_us

    placed.forward = kept
    in_a_loop = in_turn({"placed": trained, "plain": lambda: 1e6 * timed(lambda: plain(x))[1]["seconds"]}, rounds, told=False)
    model(x)
    placed.forward = repeated
    alone = [1e6 * timed(dropped)[1]["seconds"] for _ in range(rounds)]
    walls, costs = zip(*in_a_loop["placed"], strict=True)
    return {
        "module": name,
        "parameters": sum(1 for _ in model.parameters()),
        "buffers": sum(1 for _ in model.buffers()),
        "cost_us": _quartiles(alone),
        "in_a_loop_us": _quartiles(costs),
        "forward_us": statistics.median(walls),
        "plain_forward_us": statistics.median(in_a_loop["plain"]),
    }


def _quartiles(samples: Sequence[float]) -> Row:
    low, median, high = statistics.quantiles(samples, n=4)
    return {"median": median, "quartiles": [low, high]}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in MODULES:
        rows.append(cost_of(name, args.rounds))
        yield {"rows": rows}


COLUMNS = {
    "module": "{module}",
    "parameters": "{parameters}",
    "buffers": "{buffers}",
    "us a call": "{cost_us[median]:.1f}",
    "in a loop": "{in_a_loop_us[median]:.1f}",
}
main = Benchmark("call_cost", __doc__, {"--rounds": 200}, measure, lambda found: table(COLUMNS, found["rows"])).main

if __name__ == "__main__":
    main()
