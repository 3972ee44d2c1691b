"""`baechi` on worker processes whose `auto` takes an engine that is predicted to be slower, too, and splits layers as data parallelism does
where that is predicted not to pay: so tests choose an engine, whatever the machine is like.

    ENGINE[+unasked|+unsplittable] ARGUMENTS

none: all are predicted, and none is ahead. +unasked: it is not asked whether that computes the same step. +unsplittable: layers can't be
sharded.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from typing import NoReturn

from baechi_ext.errors import ShardError
from baechi_runtime.cli.main import main
from baechi_runtime.drivers import comparing, ranking
from baechi_runtime.sharding import ranked
from baechi_runtime.sharding.strategies import DATA_PARALLEL, predicted
from baechi_runtime.torch import cluster
from baechi_runtime.torch.processes.executor import ProcessExecutor

FEW_BYTES = (4, 65536)
"""Sizes of tensors by which the link is probed."""


def unsplittable(*_: object) -> NoReturn:
    raise ShardError("no way to split it")


def prepared(_: int, engine: str, *command_line: str) -> Callable[[], int]:
    """The command in each worker."""
    name, _, further = engine.partition("+")

    def work() -> int:
        ranked.predicted = lambda searched, forecaster, name: replace(predicted(searched, forecaster, DATA_PARALLEL), name=name)
        ranking.IN_REACH = comparing.IN_REACH = 1e9
        ranking.LEAST_GAIN = 1.0 if name == "none" else -1e9
        ranking.is_near_least = comparing.is_near_least = lambda placement, found: False
        cluster._GLANCE = cluster._LOOK = (3, 0.01)
        ProcessExecutor.probe_link = partialmethod(ProcessExecutor.probe_link, sizes=FEW_BYTES)
        ranked.TITLES = {name: ranked.TITLES[name]} if name in ranked.TITLES else ranked.TITLES
        if further == "unsplittable":
            ranked.search = unsplittable
        if further == "unasked":
            ranked.TorchEngines.refusal = lambda self, whole, engine: ""
        return main(command_line)

    return work
