"""Real step times of every method's plan, interleaved with plain eager, the one-device program, DistributedDataParallel on the same global
batch, and torch.distributed.pipelining where the model can be cut into stages; where not, the reason.

    python -m benchmarks.step_time --model_name=wide_towers --num_devices=2 [--num_steps=30] [--out=benchmarks/results/NAME.json]

Prints a table: predicted and measured step, the ratio to plain eager on one core with its 95% interval, what the prediction is off,
bytes moved, and the CPU time that other processes took meanwhile. The JSON keeps every raw sample.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baechi_ext.ir.files import write_json
from baechi_ext.place.common import PlaceOptions, PlanResult
from benchmarks.baselines import DDP, PIPELINE, TITLES, Baseline, reason_against
from benchmarks.machine import machine
from benchmarks.step_time_rows import plans_of, rows
from runtime import pipeline
from runtime.accounting import how_measured
from runtime.cluster import notes_on
from runtime.compare.contender import SINGLE
from runtime.comparing import load_contenders, variants_of
from runtime.executor import Executor
from runtime.flags import cuda as cuda_flags
from runtime.flags.tensorflow import DEFAULT_WORKERS, TENSORFLOW
from runtime.measure import measure
from runtime.models.registry import FRAMEWORKS, ModelOptions, find_model
from runtime.processes.launch import run_workers
from runtime.processes.worker_group import is_worker
from runtime.program import one_device_timeline
from runtime.step import TrainingStep
from runtime.tables import as_size, as_time
from runtime.train_request import TrainRequest
from runtime.training import capture_and_profile, find_cluster, kind_of_executor, with_executor

SIZES = {
    "inception_v3": ModelOptions(8, 149),
    "wide_towers": ModelOptions(),
    "gnmt_v2": ModelOptions(16, num_devices=2, vocab_size=2000, max_seq_length=20, rnn_units=256, num_layers=4),
    "nasnet": ModelOptions(8),
    "transformer": ModelOptions(4),
    "gpt2": ModelOptions(),
    "resnet101": ModelOptions(4, 128),
    "alexnet": ModelOptions(8),
    "rnnlm": ModelOptions(),
}
METHODS = ("contiguous", "m_topo", "m_etf", "m_sct", "auto")


def run(args: argparse.Namespace, request: TrainRequest, executor: Executor) -> dict[str, Any]:
    """Everything measured, as JSON."""
    captured = capture_and_profile(request, executor)
    cluster, probe = find_cluster(request, executor)
    contenders = load_contenders(captured, cluster, executor, _requests(args))
    variants: dict[str, Any] = variants_of(contenders)
    peaks = {c.method: c.peak_bytes for c in contenders}
    with ExitStack() as stack:
        baselines, left_out = _baselines(args.baselines, request, captured.step, executor, stack)
        peaks |= {name: tuple(baseline.peak_bytes()) for name, baseline in baselines.items()}
        counting = _Counting(executor, tuple(baselines.values()))
        measurement = measure(counting, captured.step, variants | baselines, num_steps=args.num_steps)
    plans = plans_of(contenders)
    table = rows(measurement, plans, one_device_timeline(captured.alone).makespan_us)
    return {
        "command": "python -m benchmarks.step_time " + " ".join(sys.argv[1:]),
        **machine(),
        "link": None if probe is None else probe.to_json(),
        "load_of_others": measurement.load_of_others,
        "workers": kind_of_executor(request),
        "devices": notes_on(executor.devices, [*variants.values()][-1]),
        "peaks_measured_by": how_measured(executor),
        "left_out": left_out | {c.method: c.refusal for c in contenders if c.refusal},
        "rows": [{**row, "peak_memory_bytes": _peaks(row["variant"], plans, peaks)} for row in table],
    }


def _requests(args: argparse.Namespace) -> dict[str, pipeline.PlanRequest]:
    options = PlaceOptions(seed=0)
    methods = dict.fromkeys((SINGLE, *(args.methods or METHODS)))
    return {m: pipeline.PlanRequest(m, args.grouper or "tf", args.placer_type or "default", options=options) for m in methods}


def _baselines(
    kinds: Sequence[str], request: TrainRequest, step: TrainingStep, executor: Executor, stack: ExitStack
) -> tuple[dict[str, Baseline], dict[str, str]]:
    """The baselines that can run the step, started, by name; and why others cannot."""
    found, left_out = {}, {}
    for kind in kinds:
        reason = "it is run here on CPU workers alone" if request.cuda else reason_against(kind, step, request.num_devices)
        if reason is None:
            found[kind] = stack.enter_context(Baseline(kind, request, executor.devices))
        else:
            left_out[kind] = reason
    return found, left_out


def _peaks(variant: str, plans: dict[str, PlanResult], peaks: dict[str, tuple[int, ...]]) -> dict[str, list[float]]:
    predicted = list(plans[variant].timeline.peak_memory_bytes) if variant in plans else []
    return {"predicted": predicted, "measured": list(peaks.get(variant, ()))}


class _Counting:
    """An executor whose CPU time includes that of the baselines' workers."""

    def __init__(self, executor: Executor, baselines: Sequence[Baseline]) -> None:
        self._executor, self._baselines = executor, baselines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def cpu_seconds(self) -> float:
        return self._executor.cpu_seconds() + sum(baseline.cpu_seconds() for baseline in self._baselines)


def show(result: dict[str, Any]) -> None:
    console = Console(width=170, highlight=False)
    table = Table(box=None, pad_edge=False)
    columns = ("variant", "predicted", "measured", "min to max", "x eager", "95% interval", "prediction", "moved", "peak memory", "bound")
    for column in columns:
        table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
    for row in result["rows"]:
        measured, ratio = row["measured_us"], row["times_eager"]
        table.add_row(
            row["variant"],
            "-" if row["predicted_us"] is None else as_time(row["predicted_us"]),
            as_time(measured["median"]),
            f"{as_time(measured['min'])} to {as_time(max(measured['samples']))}",
            f"{ratio['median']:.2f}",
            f"{ratio['low']:.2f} to {ratio['high']:.2f}",
            "-" if row["prediction_error"] is None else f"{row['prediction_error']:+.1%}",
            as_size(row["bytes_moved"]),
            " + ".join(map(as_size, row["peak_memory_bytes"]["measured"])) or "-",
            "-" if row["lower_bound_us"] is None else as_time(row["lower_bound_us"]),
        )
    console.print(table)
    for method, verdict in result.get("verdict", {}).items():
        console.print(f"{method}: {verdict}")
    for name, reason in result["left_out"].items():
        console.print(f"{TITLES.get(name, name)}: not run, {reason}")
    load = result["load_of_others"]
    console.print(f"load of others while measuring: {'unknown' if load is None else f'{load:.1%}'} of the cores")


def _option(text: str) -> tuple[str, Any]:
    """NAME=VALUE of ModelOptions."""
    name, _, value = text.partition("=")
    if name not in {field.name for field in fields(ModelOptions)}:
        raise argparse.ArgumentTypeError(f"{name!r} is no size of a model")
    return name, int(value) if value.isdigit() else value


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=tuple(FRAMEWORKS), default="torch")
    models = "; ".join(f"{framework}: {', '.join(names)}" for framework, names in FRAMEWORKS.items())
    parser.add_argument("--model_name", default="wide_towers", help=models)
    parser.add_argument("--num_devices", type=int, help="CPU workers (default 2)")
    parser.add_argument("--num_gpus", type=int, help="CUDA devices")
    cuda_flags.add_flags(parser)
    cuda_flags.add_graphs_flag(parser)
    parser.add_argument("--set", type=_option, action="append", default=[], metavar="NAME=VALUE", help="a size, as batch_size=2")
    parser.add_argument("--num_steps", type=int, default=30)
    parser.add_argument("--methods", type=lambda text: text.split(","))
    parser.add_argument("--baselines", type=lambda text: [k for k in text.split(",") if k], default=[DDP, PIPELINE])
    parser.add_argument("--workers", choices=("thread", "process"), help="by default thread, and for TensorFlow process")
    parser.add_argument("--grouper", help="by default that of baechi train")
    parser.add_argument("--placer_type")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    find_model(args.model_name, args.framework)
    args.workers = args.workers or DEFAULT_WORKERS[args.framework]
    num_devices = cuda_flags.number_given(args) or 2
    by_tensorflow = args.framework == TENSORFLOW
    if args.workers == "process" and not by_tensorflow and not is_worker():
        run_workers(sys.argv[1:] if argv is None else argv, num_devices, 300.0, "benchmarks.step_time")
        return
    if by_tensorflow:
        from benchmarks import step_time_tensorflow
    sizes = step_time_tensorflow.SIZES if by_tensorflow else SIZES
    request = TrainRequest(
        args.model_name,
        pipeline.PlanRequest(),
        replace(sizes.get(args.model_name, ModelOptions()), **dict(args.set)),
        num_devices=num_devices,
        cuda=cuda_flags.wants_cuda(args),
        cuda_graphs=cuda_flags.graphs_wanted(args),
        split_gpu=args.split_gpu is not None,
        use_free_memory=args.use_free_memory,
        workers=args.workers,
        framework=args.framework,
    )
    if by_tensorflow:
        result: dict[str, Any] | None = step_time_tensorflow.run(args, request)
    else:
        result = with_executor(request, partial(run, args, request))
    if result is None:
        return
    show(result)
    if args.out is not None:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
