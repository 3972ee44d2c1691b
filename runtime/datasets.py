"""Making the families of baechi_ext.datasets: training steps of drawn architectures, captured, profiled and merged.

What stays the same for a seed are the architectures, their split and the captured ops; times are those of the machine, and how ops
are merged follows the times.
"""

import os
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import baechi_ext
from baechi_ext.capture.torch_joint import CaptureOptions, capture_joint
from baechi_ext.cost import attach_costs
from baechi_ext.datasets.families import INDEX
from baechi_ext.errors import FileError
from baechi_ext.group.contraction import bundled
from baechi_ext.group.merging import merge
from baechi_ext.ir import OpGraph
from baechi_ext.ir.files import require_writable, write_json
from runtime.dataset_recipes import RECIPES, architectures, splits
from runtime.executor import Executor
from runtime.host import processor
from runtime.profiler import ProfileOptions, profile_step
from runtime.progress import progress
from runtime.step import TrainingStep, optimizer_spec
from runtime.thread_executor import ThreadExecutor
from runtime.torch_devices import cpu_devices

MOST_NODES = 200
OPS_PER_NODE = 3
"""Graphs are merged to MOST_NODES nodes, smaller ones to a node for so many ops: their sizes still differ then."""
PROFILE = ProfileOptions(warmup=1, repeats=5, enough_seconds=5.0)
LEARNING_RATE = 0.05
DIGITS = 4
"""Significant ones of times: profiles do not repeat better."""


def make_family(family: str, folder: Path, graphs: int, seed: int) -> dict[str, Any]:
    """Writes the graph files of a family and then its index into `folder`/`family`, in place of what is there; returns the index.

    Raises OptionError where the family has not so many graphs, FileError where the folder can't be written.
    """
    drawn = list(zip(architectures(family, graphs, seed), splits(family, graphs, seed), strict=True))
    target = _emptied(folder / family)
    loads, entries = [os.getloadavg()[0]], []
    with ThreadExecutor(cpu_devices(1)) as executor:
        for number, (architecture, split) in enumerate(drawn):
            fine = costed_graph(executor, make_step(family, architecture, number))
            graph = coarse_graph(fine)
            entry = {"file": f"graph_{number:02d}.json", "split": split, **_facts(fine, graph)}
            entry["architecture"] = {"kind": type(architecture).__name__.lower(), **asdict(architecture)}
            graph.save(target / entry["file"], compact=True)
            loads.append(os.getloadavg()[0])
            entries.append(entry)
    load = {"least": min(loads), "most": max(loads)}
    index = {**_origin(family, graphs, seed), "load_average": load, "graphs": entries}
    write_json(target / INDEX, index, compact=True)
    return index


def make_step(family: str, architecture: Any, number: int) -> TrainingStep:
    """The training step of an architecture; weights and inputs are drawn from the number."""
    recipe = RECIPES[family]
    torch.manual_seed(number)
    module, inputs = recipe.build(architecture)
    return TrainingStep(f"{family}_{number:02d}", module, inputs, optimizer_spec(recipe.optimizer, LEARNING_RATE), number)


def costed_graph(executor: Executor, step: TrainingStep) -> OpGraph:
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
    """What a reader of the index wants to know of a graph, and of the captured one it was merged from."""
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
        "versions": {"baechi": baechi_ext.__version__, "python": platform.python_version(), "torch": torch.__version__},
        "clock": cpu_devices(1)[0].clock_name,
        "profile": {"warmup": PROFILE.warmup, "repeats": PROFILE.repeats},
    }


def _emptied(folder: Path) -> Path:
    """The folder, made if need be and without an index: that comes last, when all it names is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_writable(folder / INDEX)
        (folder / INDEX).unlink(missing_ok=True)
    except OSError as e:
        raise FileError(f"cannot make the folder {str(folder)!r}: {e.strerror}; choose another --out") from e
    return folder
