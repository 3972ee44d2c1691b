"""The formats of files that are read without a framework: small examples by their own writers, and who reads them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from baechi_ext.cost import Profile
from baechi_ext.cost.profile import Contention, OpProfile
from baechi_ext.datasets import read_index
from baechi_ext.datasets.families import INSTALLED
from baechi_ext.hybrid.plan import HybridPlan, load_plan
from baechi_ext.hybrid.splits import OpSplit
from baechi_ext.ir import Cluster, OpGraph, Plan
from baechi_ext.ir.files import encode_json, read_json, write_json
from baechi_ext.ir.hints import DeviceMap, ExpertFile
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.ir.measured import MeasuredStep
from baechi_ext.shard.plan import LayerSplit, OtherSplit, ShardPlan
from baechi_runtime.cli.main import parsed
from baechi_runtime.files.checkpoint_folder import CheckpointFolder, sealed, written_shard
from baechi_runtime.files.run_folder import RunFolder, is_sharded_run
from baechi_runtime.placeto.study_table import Point, Run, append, read_runs
from baechi_runtime.report.reading import comparison_in, results_of
from baechi_runtime.report.sharded_summary import ShardedRun
from tests.fuzz.mutations import JSON_KINDS, TEXT_KINDS
from tests.runtime.report_page.runs import towers, write_run

MADE_BY = MadeBy(("baechi", "place", "g.json"), {"baechi": "0.1.0"})


@dataclass(frozen=True)
class Format:
    """A file that is edited, in a folder of files; `write` makes the folder, and `read` reads it."""

    name: str
    file: str
    write: Callable[[Path], object]
    read: Callable[[Path], object]
    kinds: tuple[str, ...] = JSON_KINDS
    """The kinds of edits."""
    seal: Callable[[bytes], bytes] = bytes
    """Makes an edited file what its writer would have written, where a digest would hide the edit."""

    @cache  # noqa: B019 - as many as there are formats
    def example(self) -> tuple[dict[str, bytes], bytes]:
        """The contents of the folder's other files by their paths, and of the edited one."""
        with TemporaryDirectory() as folder:
            self.write(Path(folder))
            files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}
        return files, files[self.file]


def _towers(folder: Path) -> OpGraph:
    """A graph, and all that `baechi train` leaves beside it, in `folder / "run"`."""
    write_run(folder / "run", towers(1, 2))
    return OpGraph.load(folder / "run" / "graph.json")


def _write_report(folder: Path) -> None:
    _towers(folder)
    path = folder / "run" / "report.json"
    write_json(path, {**read_json(path, "report"), "kind": "baechi step report"})


def _write_graph(folder: Path) -> None:
    _towers(folder).save(folder / "run" / "graph.json", MADE_BY)


def _write_hybrid(folder: Path) -> None:
    graph, plan = _towers(folder), _plan(folder)
    split = OpSplit("n", {"batch": 2}, 0.5, 1.0, 1.0, 0.5, {"": 0.5})
    values = {name: getattr(plan, name) for name in Plan.__dataclass_fields__}
    values["placement"] = tuple(0 for _ in graph.ops)
    HybridPlan(**values, groups=((0, 1),), shard=tuple(split for _ in graph.ops)).save(folder / "run" / "plan.json", MADE_BY)


def _write_profile(folder: Path) -> None:
    graph = _towers(folder)
    ops = {op.id: OpProfile((2.0, 1.5), 4, 0, 8, (3.0, 2.5)) for op in graph.ops}
    digests = dict(zip(graph.index, graph.op_digests, strict=True))
    profile = Profile(graph.fingerprint, digests, "thread_cpu", 2, ops, {"note": "small"}, Contention(2, (40.0,)), (30.0,))
    profile.save(folder / "run" / "profile.json", MADE_BY)


def _graph(folder: Path) -> OpGraph:
    return OpGraph.load(folder / "run" / "graph.json")


def _plan(folder: Path) -> Plan:
    return load_plan(folder / "run" / "plan.json", _graph(folder))


def _again(value: Any) -> None:
    """Whatever is read can be written."""
    encode_json(value.to_json())


def _read_run(folder: Path) -> None:
    if is_sharded_run(folder / "run"):
        ShardedRun.load(folder / "run")
        return
    run = RunFolder.load(folder / "run")
    results_of(run, comparison_in(folder / "run"))
    str(run.made_by)


def _shard_plan() -> ShardPlan:
    other = OtherSplit({"batch": 4}, 2.5, -8.0)
    layer = LayerSplit("linear", {"batch": 8, "units": 16}, {"batch": 2, "units": 2}, {"compute": 2.0, "messages": -1.0}, 64.0, (other,))
    plain = LayerSplit("relu", {"batch": 8}, {"batch": 4})
    costs = {"cost_flop": 1e6, "lower_bound_flop": 1e6, "predicted_step_us": 10.0, "held_bytes": 64.0}
    return ShardPlan(
        graph="small", batch=8, devices=4, status="optimal", cost_model="default", **costs, shard={"a": layer, "b": plain}, options={"x": 1}
    )


def _write_sharded(folder: Path) -> None:
    """As docs/files.md has it."""
    run = folder / "run"
    run.mkdir()
    for name in ("shard_plan.json", "shard_plan_pase.json"):
        _shard_plan().save(run / name, MADE_BY)
    steps = {"median": 182000.0, "min": 180000.0, "samples": [182000.0]}
    parts = dict.fromkeys(("calls_us", "moves_us", "gradients_us", "update_us", "executor_us"), 1.0)
    sent = {way: {"all_reduce": {"messages": 3, "bytes": 4096.0}} for way in ("predicted", "counted")}
    held = [dict.fromkeys(("weights_bytes", "gradients_bytes", "optimizer_bytes", "kept_bytes"), 1)]
    strategy = {
        "name": "pase", "note": "optimal", "plan": "shard_plan_pase.json", "predicted_step_us": 211000.0, "predicted_parts_us": parts,
        "measured_step_us": steps, "ratio": {"median": 1.5, "low": 1.4, "high": 1.6}, "sent": sent, "held_bytes": held, "losses": [],
        "parity": {"passed": True, "max_rel_diff": 0.0}, "layers": [{"name": "linear", **parts}],
    }  # fmt: skip
    value = {
        "schema_version": 1, "kind": "baechi sharding report", **MADE_BY.to_json(), "model": "alexnet", "executor": "sharded",
        "num_devices": 2, "mesh": [2], "machine": {"tera_flops": 0.05, "gigabytes_per_second": 1.6, "latency_us": 300.0},
        "executable": "all", "single_step_us": steps, "whole": {**strategy, "name": "not split"}, "strategies": [strategy],
        "kendall_tau": 0.8, "load_of_others": 0.01, "doubts": ["one"],
    }  # fmt: skip
    write_json(run / "report.json", value)


def _write_index(folder: Path) -> None:
    graphs = read_index("ptb", INSTALLED)
    (folder / "ptb").mkdir()
    write_json(folder / "ptb" / "index.json", {**graphs, "graphs": graphs["graphs"][:2]})


def _write_runs(folder: Path) -> None:
    for repeat in range(2):
        append(folder / "runs.csv", Run("ptb", "graph_00", "topo", repeat), [Point(0, 9.0, 9.5, 0, 0.0), Point(4, 8.0, 8.5, 100, 1.25)])


def _write_checkpoint(folder: Path) -> None:
    checkpoints = CheckpointFolder(folder)
    unfinished = checkpoints.begin(2)
    shards = [written_shard(unfinished, d, lambda path, d=d: save_file({f"state/{d}": np.ones(d + 1)}, path)) for d in range(2)]
    about = {"step": 2, "training": {"model": "m", "seed": 1}, "random_state": "AAECAw==", "losses": [0.5, 0.25], **MADE_BY.to_json()}
    checkpoints.complete(unfinished, about, shards)


def _sealed(content: bytes) -> bytes:
    """Leaves what is no JSON object, or could not be written as one."""
    try:
        value = json.loads(content)
        return sealed({key: field for key, field in value.items() if key != "sha256"}) if isinstance(value, dict) else content
    except (ValueError, RecursionError):
        return content


def _config(name: str, text: str) -> Format:
    def read(folder: Path) -> None:
        parsed(["train", f"--config={folder / name}"])

    return Format(name, name, lambda folder: (folder / name).write_text(text), read, TEXT_KINDS)


_TOML = 'model_name = "wide_towers"\nnum_devices = 2\npin = ["encoder.*=0", "head=1"]\nresidual = true\ntime_limit = 1.5\n'
_YAML = 'model_name: wide_towers\nnum_devices: 2\npin:\n  - "encoder.*=0"\n  - head=1\nresidual: true\ntime_limit: 1.5\n'
_EXPERT = {"conv.1.*": 1, "loss": 0, "weight.0.0": 1}
_MAP = {"": 0, "towers.1": 1}


def _hints(folder: Path) -> None:
    DeviceMap.load(folder / "map.json").apply(_graph(folder), ("device:0", "device:1"))


FORMATS = {
    form.name: form
    for form in (
        Format("graph", "run/graph.json", _write_graph, lambda folder: _again(_graph(folder))),
        Format("plan", "run/plan.json", _towers, lambda folder: _again(_plan(folder))),
        Format("hybrid_plan", "run/plan.json", _write_hybrid, lambda folder: _again(_plan(folder))),
        Format("profile", "run/profile.json", _write_profile,
               lambda folder: _again(Profile.load(folder / "run" / "profile.json", _graph(folder)))),
        Format("measured", "run/measured.json", _towers,
               lambda folder: _again(MeasuredStep.load(folder / "run" / "measured.json", _graph(folder)))),
        Format("cluster", "cluster.json", lambda folder: Cluster.uniform(3).save(folder / "cluster.json", MADE_BY),
               lambda folder: _again(Cluster.load(folder / "cluster.json"))),
        Format("expert", "expert.json", lambda folder: (_towers(folder), write_json(folder / "expert.json", _EXPERT)),
               lambda folder: ExpertFile.load(folder / "expert.json").apply(_graph(folder))),
        Format("device_map", "map.json", lambda folder: (_towers(folder), write_json(folder / "map.json", _MAP)), _hints),
        Format("shard_plan", "plan.json", lambda folder: _shard_plan().save(folder / "plan.json", MADE_BY),
               lambda folder: _again(ShardPlan.load(folder / "plan.json"))),
        Format("report", "run/report.json", _write_report, _read_run),
        Format("comparison", "run/compare.json", _towers, lambda folder: comparison_in(folder / "run")),
        Format("sharding_report", "run/report.json", _write_sharded, lambda folder: ShardedRun.load(folder / "run")),
        Format("sharded_plan", "run/shard_plan.json", _write_sharded, _read_run),
        Format("index", "ptb/index.json", _write_index, lambda folder: read_index("ptb", folder)),
        Format("runs", "runs.csv", _write_runs, lambda folder: read_runs(folder / "runs.csv", 4), TEXT_KINDS),
        Format("checkpoint", "step_00000002/checkpoint.json", _write_checkpoint, lambda folder: CheckpointFolder(folder).verify()),
        Format("sealed_checkpoint", "step_00000002/checkpoint.json", _write_checkpoint,
               lambda folder: CheckpointFolder(folder).verify(), seal=_sealed),
        Format("shard", "step_00000002/device_0.safetensors", _write_checkpoint, lambda folder: CheckpointFolder(folder).verify()),
        _config("config.toml", _TOML),
        _config("config.yaml", _YAML),
    )
}  # fmt: skip
