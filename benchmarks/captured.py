"""Graphs of real training steps to compare placers on: the built-in models, captured and profiled on this machine.

    python -m benchmarks.captured inception_v3 --out=FILE.json
    python -m benchmarks.captured inception_v3 --most_ops=500 --out=FILE.json.gz

With `--most_ops` neighbours are merged until so few ops are left, as in data sets: as many as a learned placer can visit one by one; with
`--graph=FILE.json` those of a graph that was captured before. Profiled times differ from run to run, so a comparison keeps the graph
file and uses it for all methods.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from baechi_ext.group.contraction import bundled
from baechi_ext.group.merging import merge
from baechi_ext.ir import Cluster, OpGraph
from benchmarks.families import cluster_for

MODELS = ("inception_v3", "wide_towers", "gnmt_v2", "nasnet")
SETTINGS = ((0.1, "2", "loose"), (1.0, "4", "tight"), (1.0, "8", "loose"))
"""ccr, devices and memory, as in benchmarks/families.py."""


@dataclass(frozen=True)
class CapturedCase:
    """The step of one model on one cluster; its graph is in a file of `folder`, and is made where that is missing."""

    model: str
    ccr: float
    devices: str
    memory: str
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.model}-{self.ccr:g}-{self.devices}-{self.memory}"

    @cached_property
    def graph(self) -> OpGraph:
        path = self.folder / f"{self.model}.json"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            # Not in this process: capturing pins threads to cores.
            subprocess.run([sys.executable, "-m", "benchmarks.captured", self.model, f"--out={path}"], check=True)
        return OpGraph.load(path)

    @cached_property
    def cluster(self) -> Cluster:
        return cluster_for(self.graph, self.ccr, self.devices, self.memory)


def captured_cases(folder: Path) -> tuple[CapturedCase, ...]:
    return tuple(CapturedCase(model, *setting, folder) for model in MODELS for setting in SETTINGS)


def costed_graph(model: str) -> OpGraph:
    """The model's training step, captured and profiled here."""
    from benchmarks.step_time import SIZES
    from runtime import pipeline
    from runtime.thread_executor import ThreadExecutor
    from runtime.torch_devices import cpu_devices
    from runtime.train_request import TrainRequest
    from runtime.training import capture_and_profile

    request = TrainRequest(model, pipeline.PlanRequest(), SIZES[model], num_devices=1)
    with ThreadExecutor(cpu_devices(1)) as executor:
        return capture_and_profile(request, executor).graph


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--graph", type=Path, help="take this file instead of capturing")
    parser.add_argument("--most_ops", type=int, help="merge neighbours until so few ops are left")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    graph = costed_graph(args.model) if args.graph is None else OpGraph.load(args.graph)
    if args.most_ops is not None:
        graph = bundled(merge(graph, args.most_ops).coarse)
    graph.save(args.out, compact=args.out.suffix == ".gz")


if __name__ == "__main__":
    main()
