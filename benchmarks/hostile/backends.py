"""Ways to run a loop's modules: as they are, by a backend of TorchDynamo, or placed; each says what it has run, where it can."""

import weakref
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from benchmarks.hostile.suite import Wrap

Stats = Callable[[], dict[str, Any]]
"""Return what was run how: for the result file, no part of what is compared."""


def plain() -> tuple[Wrap, Stats]:
    return lambda module: module, dict


def aot_eager() -> tuple[Wrap, Stats]:
    """TorchDynamo and AOTAutograd with the graphs run op by op."""
    from benchmarks.hostile.torch_private import dynamo_backend, graph_breaks

    runs = {"graphs": 0, "graph_runs": 0}

    def counting(graph: Any, inputs: Any) -> Any:
        compiled = dynamo_backend("aot_eager")(graph, inputs)
        runs["graphs"] += 1

        def run(*args: Any) -> Any:
            runs["graph_runs"] += 1
            return compiled(*args)

        return run

    def wrap(module: nn.Module) -> nn.Module:
        module.compile(backend=counting)
        return module

    return wrap, lambda: {**runs, **_counted(graph_breaks())}


PLACED = {"devices": 2, "method": "m_etf", "keep_placed": True, "cache": False}
"""Whatever can be placed is placed, and stays so, though these models are far too small to gain."""


def baechi(parts: int = 1) -> tuple[Wrap, Stats]:
    """Placing on two workers, the batch of each call in so many parts where it can be split."""
    import baechi_ext

    modules: list[weakref.ref[nn.Module]] = []

    def wrap(module: nn.Module) -> nn.Module:
        placed = baechi_ext.parallelize(module, **PLACED, microbatches=parts)
        modules.append(weakref.ref(placed))
        return placed

    def stats() -> dict[str, Any]:
        alive = [module for held in modules if (module := held()) is not None]
        found = [baechi_ext.report(module).to_json() for module in alive]
        kept = ("placed_steps", "unplaced_calls", "verification", "shapes", "refusal", "microbatches", "notes")
        allowed = [report["verification"]["tolerance"] for report in found if report["microbatches"]]
        return {"modules": [{name: report[name] for name in kept} for report in found], "tolerance": max(allowed, default=0.0)}

    return wrap, stats


def _counted(breaks: Counter) -> dict[str, Any]:
    return {"graph_breaks": sum(breaks.values()), "reasons": [reason.partition("\n")[0][:100] for reason, _ in breaks.most_common(3)]}


BACKENDS: dict[str, Callable[[], tuple[Wrap, Stats]]] = {"plain": plain, "aot_eager": aot_eager, "baechi": baechi}


def backend(name: str) -> tuple[Wrap, Stats]:
    """Start the backend of this name, of NAME@PARTS for calls whose batch goes in parts, or of MODULE:FUNCTION, a function that returns the
    two as those here do.

    Raises KeyError for an unknown name.
    """
    module, colon, function = name.partition(":")
    if colon:
        return getattr(import_module(module), function)()
    name, _, parts = name.partition("@")
    return BACKENDS[name](int(parts)) if parts else BACKENDS[name]()  # type: ignore[call-arg]
