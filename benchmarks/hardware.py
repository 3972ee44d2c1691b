"""Predictions for hardware held against the hardware that is here: this machine's cores, as `baechi train --hardware=cpu` sees them.

    python -m benchmarks.hardware --out=benchmarks/results/hardware.json

Ops are profiled with one thread, by its CPU time. Predicted are the same ops by their counts alone; the step with two threads an op, from
the profile scaled by twice what a core can do, beside the CPU time of the thread that starts an op and then sleeps until the other is done
too; and the step of two worker processes that `baechi train --workers=process` runs, from the profile and the assumed link. All are the
least of their repeats, as other programs only ever add to one. Steps of workers go by the clock on the wall: where others took more than a
tenth of the cores, they are in the file and count for nothing. The ratio is measured over predicted.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch

from baechi_ext.capture.torch_counts import with_counts
from baechi_ext.capture.torch_joint import INPUT, UPDATE
from baechi_ext.cost.hardware import Hardware, costs_on
from baechi_ext.ir import OpGraph
from baechi_ext.ir.plan import PlanFile
from baechi_ext.python_process import command_of, surroundings
from baechi_ext.simulate import simulate
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.host.processor import available_cores
from baechi_runtime.measure.samples import NOISY_LOAD, LoadOfOthers
from baechi_runtime.torch.backend import capture
from baechi_runtime.torch.hardware_probe import cpu_hardware
from baechi_runtime.torch.lowering.devices import CpuDevice
from baechi_runtime.torch.profiler import FULL, profile_step
from baechi_runtime.torch.threads.executor import ThreadExecutor
from benchmarks.runner import Benchmark, Row, child, in_fresh_process, progress, table
from benchmarks.sizes import SIZES

COUNTED, THREADS, WORKERS = "counted", "2 threads an op", "2 worker processes"
_LEAST_US = 20.0
"""Ops that take less are mostly their start."""
_NUM_STEPS, _TIMEOUT_SECONDS = 15, 600
MODELS = ("alexnet", "gpt2", "inception_v3", "wide_towers", "rnnlm")


class _Threads(CpuDevice):
    """A device that computes an op with several threads, on any core, by the CPU time of the one that starts it."""

    def __init__(self, threads: int) -> None:
        super().__init__(0)
        self.threads = threads

    def enter(self) -> None:
        torch.get_num_threads()  # see TorchDevice.enter
        torch.set_num_threads(self.threads)


def profiled(model: str) -> tuple[OpGraph, dict[int, dict[str, float]], Hardware, float | None]:
    """The counted graph, by threads each op's least microseconds, what a core can do, and the load of others."""
    load = LoadOfOthers(time.process_time, available_cores())
    step, graph, binding = capture(TrainRequest(model, PlanRequest(), SIZES[model]))
    found = {}
    for threads, device in {1: CpuDevice(0), 2: _Threads(2)}.items():
        with ThreadExecutor([device]) as executor:
            profile = profile_step(executor, graph, binding, step, FULL)
        found[threads] = {id_: op.min_us for id_, op in profile.ops.items()}
    return with_counts(graph, binding), found, cpu_hardware(), load.share()


def placed(model: str, graph: OpGraph, hardware: Hardware) -> Row:
    """The step of a plan for two worker processes, as it runs and as it is predicted with the costs of `graph`."""
    sizes = {
        name: value
        for name in ("batch_size", "image_size", "vocab_size", "max_seq_length", "rnn_units", "num_layers")
        if (value := getattr(SIZES[model], name)) is not None
    }
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--model_name={model}", "--num_devices=2", "--workers=process", "--placement_method=m_etf", f"--num_steps={_NUM_STEPS}"]
        words += [f"--{name}={value}" for name, value in sizes.items()] + [f"--out={folder}", "--quiet"]
        environment = {name: value for name, value in surroundings().items() if name != "OMP_WAIT_POLICY"}
        ended = child(command_of("baechi_runtime", "train", *words), _TIMEOUT_SECONDS, environment)
        if ended.code != 0:
            raise SystemExit(f"error: {model} on two worker processes: {ended.err}")
        report = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))
        plan = PlanFile.load(Path(folder) / "plan.json").on(graph, hardware.cluster(2))
    predicted = simulate(graph, hardware.cluster(2), plan.placement, plan.priority).makespan_us
    samples = report["measured_step_us"]["placed"]
    own = {"median_us": samples["median"], "predicted_by_the_run_us": report["predicted_step_us"]["placed"]}
    return _row(model, WORKERS, predicted, samples["min"]) | own | {"load_of_others": report["load_of_others"]}


def _row(model: str, setting: str, predicted_us: float, measured_us: float) -> Row:
    ratio = measured_us / predicted_us
    return {"model": model, "setting": setting, "predicted_us": predicted_us, "measured_us": measured_us, "ratio": ratio}


def _of_ops(predicted: OpGraph, measured_us: Mapping[str, float]) -> Row:
    """The error of op times: the median and what 90% stay below, without regard to the sign and without the step's common factor."""
    factor = sum(measured_us.values()) / predicted.total_compute_us()
    ops = [op for op in predicted.ops if measured_us[op.id] >= _LEAST_US]
    errors = sorted(abs(op.compute_us * factor / measured_us[op.id] - 1) for op in ops)
    share = sum(measured_us[op.id] for op in ops) / sum(measured_us.values())
    return {
        "ops": len(ops),
        "ops_share_of_step": share,
        "ops_median_error": statistics.median(errors),
        "ops_90_error": quantile(errors, 0.9),
        "ops_90_ratios": _by_time(predicted, measured_us),
    }


def _by_time(predicted: OpGraph, measured_us: Mapping[str, float]) -> list[float]:
    """Two ratios of ops, measured over predicted, between which ops of 90% of the measured time lie."""
    ratios = sorted((measured_us[op.id] / op.compute_us, measured_us[op.id]) for op in predicted.ops if op.compute_us)
    shares = list(accumulate(us / sum(us for _, us in ratios) for _, us in ratios))
    return [ratios[min(bisect(shares, share), len(ratios) - 1)][0] for share in (0.05, 0.95)]


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of them stays at or below."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, round(share * (len(ordered) - 1))))]


def spread(ratios: Sequence[float]) -> Row:
    """The middle of the ratios, and where 90% of them lie: with few, all."""
    return {"middle": statistics.median(ratios), "low": quantile(ratios, 0.05), "high": quantile(ratios, 0.95), "of": len(ratios)}


def is_quiet(row: Row) -> bool:
    """True if a row was measured with little enough load of others, which CPU time does not see."""
    return row["setting"] != WORKERS or (row["load_of_others"] or 0.0) <= NOISY_LOAD


def summary(rows: Sequence[Row]) -> Row:
    """The spreads, `scaled` of both settings with measured costs, and errors of steps; where ops were counted alone, after the prediction
    was lengthened as the other models' steps ask for."""
    ratios = {s: {row["model"]: row["ratio"] for row in rows if row["setting"] == s and is_quiet(row)} for s in (COUNTED, THREADS, WORKERS)}
    errors = {s: [abs(1 / ratio - 1) for ratio in ratios[s].values()] for s in (THREADS, WORKERS)}
    others = {m: [ratio for other, ratio in ratios[COUNTED].items() if other != m] for m in ratios[COUNTED]}
    errors[COUNTED] = [abs(statistics.median(others[m]) / ratio - 1) for m, ratio in ratios[COUNTED].items() if others[m]]
    found = {s: {"median_error": statistics.median(e), "error_of_90": quantile(e, 0.9)} for s, e in errors.items() if e}
    ends = [row["ops_90_ratios"] for row in rows if row["setting"] == COUNTED]
    of_ops = {name: statistics.median(values) for name, values in zip(("low", "high"), zip(*ends, strict=True), strict=True)}
    scaled = [*ratios[THREADS].values(), *ratios[WORKERS].values()]
    steps = {"spread_counted": spread([*ratios[COUNTED].values()]), "spread_scaled": spread(scaled)}
    return {"step_errors": found, **steps, "spread_of_ops": of_ops}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    os.environ["OMP_WAIT_POLICY"] = "passive"  # of the processes to come: a thread that waits for another one sleeps
    rows: list[Row] = []
    small: list[float] = []
    for model in MODELS:
        progress(model)
        graph, us, one, load = in_fresh_process(profiled, model)
        costed = graph.replace_ops([replace(op, compute_us=us[1][op.id]) for op in graph.ops])
        counts = graph.replace_ops([replace(op, compute_us=one.roofline_us(op)) for op in graph.ops])
        two = replace(one, flop_per_us=2 * one.flop_per_us, convolution_flop_per_us=2 * one.flop_per_us, bytes_per_us=2 * one.bytes_per_us)
        threads = costs_on(costed, two, one)
        rows.append(
            _row(model, COUNTED, counts.total_compute_us(), sum(us[1].values())) | _of_ops(counts, us[1]) | {"load_of_others": load}
        )
        rows.append(
            _row(model, THREADS, threads.total_compute_us(), sum(us[2].values())) | _of_ops(threads, us[2]) | {"load_of_others": load}
        )
        rows.append(placed(model, costed, one))
        small += [us[1][op.id] for op in graph.ops if op.op != INPUT and op.phase != UPDATE and one.roofline_us(op) < one.start_us + 1]
        facts = {"probes": [{"model": model, "core": one.source}], "small_op_us": statistics.median(small or [0]), "small_ops": len(small)}
        yield {**facts, **summary(rows), "rows": rows[-3:]}


COLUMNS = {
    "model": "{model}",
    "predicted": "{setting}",
    "predicted ms": lambda row: f"{row['predicted_us'] / 1e3:.4g}",
    "measured ms": lambda row: f"{row['measured_us'] / 1e3:.4g}",
    "measured / predicted": "{ratio:.2f}",
    "ops, median error": lambda row: "" if "ops" not in row else f"{row['ops_median_error']:.0%}",
    "90% below": lambda row: "" if "ops" not in row else f"{row['ops_90_error']:.0%}",
    "load of others": lambda row: "unknown" if row["load_of_others"] is None else f"{row['load_of_others']:.0%}",
}


def report(found: Row) -> str:
    spreads = {
        name: "{middle:.2f} ({low:.2f} to {high:.2f}, {of} steps)".format_map(found[f"spread_{name}"]) for name in ("counted", "scaled")
    }
    errors = "; ".join(f"{s}: median {e['median_error']:.0%}, 90% below {e['error_of_90']:.0%}" for s, e in found["step_errors"].items())
    return f"{table(COLUMNS, found['rows'])}\n\nmeasured / predicted: {spreads}\nerrors of steps: {errors}"


main = Benchmark("hardware", __doc__, {}, measure, report).main

if __name__ == "__main__":
    main()
