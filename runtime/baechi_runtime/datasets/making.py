"""Making the families of baechi_ext.datasets: training steps of drawn architectures, captured, profiled and merged.

What stays the same for a seed are the architectures, their split and the captured ops; times are those of the machine, and how ops
are merged follows the times.
"""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from baechi_ext.capture.torch_joint import CaptureOptions, capture_joint
from baechi_ext.cost import attach_costs
from baechi_ext.datasets.families import INDEX
from baechi_ext.errors import FileError
from baechi_ext.group.grouping import bundled
from baechi_ext.group.merging import merge
from baechi_ext.ir import OpGraph
from baechi_ext.ir.files import make_folder, read_json, write_json
from baechi_ext.ir.made_by import versions
from baechi_runtime.datasets.recipes import RECIPES, architectures, splits
from baechi_runtime.host.processor import processor
from baechi_runtime.models.training_step import TrainingStep, optimizer_spec
from baechi_runtime.report.progress import progress
from baechi_runtime.torch.lowering.devices import cpu_devices
from baechi_runtime.torch.profiler import ProfileOptions, profile_step
from baechi_runtime.torch.threads.executor import ThreadExecutor

UNFINISHED = "unfinished.json"
"""The index as far as it goes, while a family is being made."""
MOST_NODES = 200
OPS_PER_NODE = 3
"""Graphs are merged to MOST_NODES nodes, smaller ones to one node per OPS_PER_NODE ops, so that their sizes still differ."""
PROFILE = ProfileOptions(warmup=1, repeats=5, enough_seconds=5.0)
LEARNING_RATE = 0.05
DIGITS = 4
"""Significant digits of times: profiles do not repeat more exactly."""


def make_family(family: str, folder: Path, graphs: int, seed: int) -> int:
    """Writes the graph files of a family and then its index into `folder`/`family`; returns how many graphs it had to make.

    What the same command has made there before is kept: all of them, or those that were done when it was interrupted. What another
    one has made is replaced. Raises OptionError where the family has not so many graphs, FileError where the folder can't be written.
    """
    drawn = list(zip(architectures(family, graphs, seed), splits(family, graphs, seed), strict=True))
    target = folder / family
    make_folder(target)
    index = _begun(target, _origin(family, graphs, seed))
    entries = index["graphs"]
    kept = len(entries)
    if kept == graphs:
        return 0
    (target / INDEX).unlink(missing_ok=True)
    for path in () if kept else list(target.glob("graph_[0-9]*.json.gz")):
        path.unlink()
    with ThreadExecutor(cpu_devices(1)) as executor:
        for number, (architecture, split) in list(enumerate(drawn))[kept:]:
            fine = costed_graph(executor, make_step(family, architecture, number))
            graph = coarse_graph(fine)
            entry = {"file": f"graph_{number:02d}.json.gz", "split": split, **_facts(fine, graph)}
            entry["architecture"] = {"kind": type(architecture).__name__.lower(), **asdict(architecture)}
            graph.save(target / entry["file"], compact=True)
            entries.append(entry)
            index["load_average"] = _with(index["load_average"], os.getloadavg()[0])
            write_json(target / (UNFINISHED if len(entries) < graphs else INDEX), index, compact=True)
    (target / UNFINISHED).unlink(missing_ok=True)
    return graphs - kept


def make_step(family: str, architecture: Any, number: int) -> TrainingStep:
    """The training step of an architecture; weights and inputs are drawn from the number."""
    recipe = RECIPES[family]
    torch.manual_seed(number)
    module, inputs = recipe.build(architecture)
    return TrainingStep(f"{family}_{number:02d}", module, inputs, optimizer_spec(recipe.optimizer, LEARNING_RATE), number)


def costed_graph(executor: ThreadExecutor, step: TrainingStep) -> OpGraph:
    """The graph of a step with the costs of the executor's device 0, working alone."""
    options = CaptureOptions(step.optimizer.name, step.optimizer.slots)
    with progress(f"capturing {step.name}"):
        graph, binding = capture_joint(step.module, step.inputs, options, step.name)
    return attach_costs(graph, profile_step(executor, graph, binding, step, PROFILE))


def coarse_graph(graph: OpGraph) -> OpGraph:
    """The graph as a data set has it: merged, tensors of the same readers sent as one, times rounded."""
    coarse = bundled(merge(graph, min(MOST_NODES, max(1, len(graph) // OPS_PER_NODE))).coarse)
    return coarse.replace_ops([replace(op, compute_us=float(f"{op.compute_us:.{DIGITS}g}")) for op in coarse.ops])


def _facts(fine: OpGraph, graph: OpGraph) -> dict[str, Any]:
    """Facts for readers of the index about a graph, and about the captured one it was merged from."""
    return {
        "captured_ops": len(fine),
        "nodes": len(graph),
        "edges": sum(len(t.readers) for t in graph.tensors),
        "compute_us": graph.total_compute_us(),
        "longest_path_us": max(graph.tails_us),
        "captured_longest_path_us": max(fine.tails_us),
    }


def _origin(family: str, graphs: int, seed: int) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "family": family,
        "recipe": RECIPES[family].text,
        "seed": seed,
        "command": f"baechi datasets make {family} --graphs={graphs} --seed={seed}",
        "machine": {"processor": processor(), "cores": os.cpu_count()},
        "versions": versions(),
        "clock": cpu_devices(1)[0].clock_name,
        "profile": {"warmup": PROFILE.warmup, "repeats": PROFILE.repeats},
    }


def _begun(folder: Path, origin: dict[str, Any]) -> dict[str, Any]:
    """The index of what is there of the same origin, whole or as far as it goes; else one without graphs."""
    for name in (INDEX, UNFINISHED):
        if (folder / name).exists():
            index = read_json(folder / name, "index")
            if any(index.get(key) != value for key, value in origin.items()):
                continue
            try:
                _with(index["load_average"], 0.0)
                if all(os.path.exists(folder / entry["file"]) for entry in index["graphs"]):
                    return index
            except (KeyError, TypeError) as e:
                named = repr(str(folder / name))
                raise FileError(f"{named} is not an index that datasets make wrote ({e!r}); remove it, or choose another --out") from e
    load = os.getloadavg()[0]
    return {**origin, "load_average": {"least": load, "most": load}, "graphs": []}


def _with(range_: dict[str, float], value: float) -> dict[str, float]:
    return {"least": min(range_["least"], value), "most": max(range_["most"], value)}
