"""Graphs of real training steps to compare placers on: the built-in models, captured and profiled on this machine.

    python -m benchmarks.captured inception_v3 --out=FILE.json
    python -m benchmarks.captured inception_v3 --most_ops=500 --out=FILE.json.gz
    python -m benchmarks.captured gpt2 --parts=2 --out=FILE.json

With `--parts` the batch is split into so many parts with ops of their own, BatchNorm by part. With `--most_ops` neighbours are merged until
so few ops are left, as in data sets: as many as a learned placer can visit one by one; with `--graph=FILE.json` those of a graph that was
captured before. Profiled times differ from run to run, so a comparison keeps the graph file and uses it for all methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from baechi_ext.group.grouping import bundled
from baechi_ext.group.merging import merge
from baechi_ext.ir import Cluster, OpGraph
from benchmarks.families import cluster_for
from benchmarks.runner import in_fresh_process, parsed
from benchmarks.sizes import SIZES

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
            in_fresh_process(main, [self.model, f"--out={path}"])  # not in this one: capturing pins threads to cores
        return OpGraph.load(path)

    @cached_property
    def cluster(self) -> Cluster:
        return cluster_for(self.graph, self.ccr, self.devices, self.memory)


def captured_cases(folder: Path) -> tuple[CapturedCase, ...]:
    return tuple(CapturedCase(model, *setting, folder) for model in MODELS for setting in SETTINGS)


def costed_graph(model: str, parts: int = 1) -> OpGraph:
    """The model's training step over this many parts of its batch, captured and profiled here."""
    from baechi_runtime.drivers import pipeline
    from baechi_runtime.drivers.train_request import TrainRequest
    from baechi_runtime.torch.backend import TorchBackend, on_devices

    if model not in SIZES:
        raise SystemExit(f"error: there is no size for a model {model!r}; choose one of {', '.join(SIZES)}")
    request = TrainRequest(model, pipeline.PlanRequest(), SIZES[model], num_devices=1, batch_norm_per_part=parts > 1)

    def captured(backend: TorchBackend) -> OpGraph:
        whole = backend.capture()
        return whole.graph if parts == 1 else backend.in_parts(whole, parts).graph

    return on_devices(request, captured)


FLAGS = {
    "model": {},
    "--parts": {"type": int, "default": 1, "metavar": "N", "help": "of the batch"},
    "--graph": {"type": Path, "help": "take this file instead of capturing"},
    "--most_ops": {"type": int, "help": "merge neighbours until so few ops are left"},
    "--out": {"type": Path, "required": True},
}


def main(argv: Sequence[str] | None = None) -> None:
    args = parsed(__doc__, FLAGS, argv)
    graph = costed_graph(args.model, args.parts) if args.graph is None else OpGraph.load(args.graph)
    if args.most_ops is not None:
        graph = bundled(merge(graph, args.most_ops).coarse)
    graph.save(args.out, compact=args.out.suffix == ".gz")


if __name__ == "__main__":
    main()
