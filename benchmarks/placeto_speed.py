"""Measures how many steps of Placeto's decision process a second allows, on the graphs of a family that have 200 nodes.

    python -m benchmarks.placeto_speed --out=benchmarks/results/placeto_speed.json

A step is one decision of one episode: observed, chosen by the network, and simulated where it changes the plan. `episodes` are those
steps alone, the embedding included; `training` is what updates of PPO leave of them. Seconds are of one thread's processor time, so
that the figure is that of a core without other work.
"""

import argparse
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from baechi_ext import datasets
from baechi_ext.ir import Cluster
from baechi_ext.place.placeto.environment import Rules
from baechi_ext.place.placeto.policy import Policy, PolicyConfig
from baechi_ext.place.placeto.train import Trainer, TrainingConfig, single_threaded_torch
from baechi_ext.place.placeto.training_task import TrainingTask
from benchmarks.order_rules import BAECHIS_LINK
from benchmarks.runner import Benchmark, Row

NODES = 200
GRAPHS, REPEATS = 4, 5


def trainings(family: str, batch: int, devices: int) -> list[TrainingTask]:
    """The first graphs of the family's train split that have NODES nodes, on equal devices with Baechi's link."""
    graphs = [graph for graph in datasets.load(family, "train") if len(graph) == NODES]
    return [TrainingTask.of(graph, Cluster.uniform(devices, link=BAECHIS_LINK), batch, Rules()) for graph in graphs[:GRAPHS]]


def rate(steps: int, marks_seconds: Sequence[float]) -> dict[str, float]:
    """Steps a second between each two marks, so many each time: the median, and in the slowest and the quickest."""
    rates = steps / np.diff(marks_seconds)
    return {"steps_per_second": float(np.median(rates)), "least": float(rates.min()), "most": float(rates.max())}


def measured(family: str, batch: int, devices: int) -> Row:
    """The figures of a fresh policy, whose episodes change most decisions. What comes before the first mark compiles."""
    taught = trainings(family, batch, devices)
    policy, generator = Policy.fresh(PolicyConfig(), 0), torch.Generator().manual_seed(0)
    steps = sum(training.environment.horizon * batch for training in taught)
    alone: list[float] = []
    with single_threaded_torch():
        for _ in range(REPEATS + 1):
            for training in taught:
                training.run(policy, generator)
            alone.append(time.process_time())
    learning: list[float] = []
    config = TrainingConfig(updates=REPEATS + 1, graphs=len(taught))
    Trainer(policy, taught, config).run(lambda _: learning.append(time.process_time()))
    sizes = {"nodes": NODES, "decisions": [len(training.decisions) for training in taught], "episodes_at_once": batch, "devices": devices}
    return {"family": family, **sizes, "episodes": rate(steps, alone), "training": rate(steps, learning)}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    yield measured(args.family, args.episodes, args.num_devices)


def report(found: Row) -> str:
    return "\n".join(f"{what:10}{found[what]['steps_per_second']:8.0f} steps a second of one core" for what in ("episodes", "training"))


FLAGS = {
    "--family": {"choices": tuple(datasets.FAMILIES), "default": "cifar10"},
    "--episodes": {"type": int, "default": 8, "help": "at once"},
    "--num_devices": 3,
}
main = Benchmark("placeto_speed", __doc__, FLAGS, measure, report).main

if __name__ == "__main__":
    main()
