"""Real step times of every method's plan, interleaved with plain eager, the one-device program, DistributedDataParallel on the same global
batch, and torch.distributed.pipelining where the model can be cut into stages; where not, the reason.

    python -m benchmarks.step_time --model_name=wide_towers --num_devices=2 [--num_steps=30] [--out=benchmarks/results/NAME.json]

Prints a table: predicted and measured step, the ratio to plain eager on one core with its 95% interval, what the prediction is off,
bytes moved, and the CPU time that other processes took meanwhile. The JSON keeps every raw sample.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from typing import Any

from msgspec import to_builtins

from baechi_ext.place.common import PlanResult
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.cli.flags import compare as compare_flags
from baechi_runtime.cli.flags.train import TENSORFLOW
from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.backend import Backend
from baechi_runtime.drivers.comparing import checked_contenders, in_parts, loaded_contenders
from baechi_runtime.drivers.comparison import CompareRequest
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.measure.samples import Measurement
from baechi_runtime.models.registry import FRAMEWORKS, ModelOptions, find_model
from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.report.report import SINGLE, ParityCheck, ProbedLink
from baechi_runtime.torch.backend import TorchBackend
from baechi_runtime.torch.processes.environment import is_worker
from baechi_runtime.torch.processes.executor import Executor
from baechi_runtime.torch.processes.launch import run_workers
from benchmarks.baselines import DDP, PIPELINE, Baseline, reason_against
from benchmarks.runner import Benchmark, Row, some_of
from benchmarks.step_time_table import report as step_times

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
SIZES_TENSORFLOW = {
    "inception_v3": ModelOptions(4, 299),
    "wide_towers": ModelOptions(),
    "gnmt_v2": ModelOptions(32, num_devices=2, vocab_size=2000, max_seq_length=10, rnn_units=1024, num_layers=4),
    "nasnet": ModelOptions(4),
}
TIME_LIMIT_SECONDS = 60
"""The time of a search."""
METHODS = {
    "torch": ("contiguous", "m_topo", "m_etf", "m_sct", "auto"),
    TENSORFLOW: ("contiguous", "expert", "m_topo", "m_etf", "m_sct", "auto"),
}


def run(args: argparse.Namespace, requests: Mapping[str, pipeline.PlanRequest], backend: Backend) -> Row:
    """Everything measured, as JSON."""
    captured = backend.capture()
    cluster, probe = backend.cluster()
    contenders = checked_contenders(captured, cluster, backend, requests)
    variants = loaded_contenders(captured, contenders, backend)
    plans = {c.method: c.result for c in contenders if c.method != SINGLE and c.result is not None and not c.refusal}
    peaks = {c.method: c.peak_bytes for c in contenders}
    parity = {c.method: to_builtins(ParityCheck.of(c.parity)) for c in contenders if c.parity is not None}
    notes = [*captured.notes, *backend.notes([*variants.values()][-1])]
    with ExitStack() as stack:
        left_out, refused = {}, {}
        if args.framework == TENSORFLOW:
            from benchmarks.step_time_tensorflow import add_by_hand

            add_by_hand(backend, captured, plans, (variants, peaks, parity))
        else:
            for count in args.parts:
                name = f"auto, {count} parts"
                train = replace(backend.request, plan=requests["auto"])
                contender = in_parts(train, backend, captured, count, (cluster, probe))
                if contender.result is None or contender.parity is None or contender.refusal:
                    refused[name] = contender.refusal
                    continue
                plans[name], peaks[name] = contender.result, contender.peak_bytes
                parity[name] = to_builtins(ParityCheck.of(contender.parity))
                (variants[name],) = loaded_contenders(captured, [contender], backend).values()
            baselines, left_out = _baselines(args.baselines, backend.request, captured.step, backend.executor, stack)
            peaks |= {name: tuple(baseline.peak_bytes()) for name, baseline in baselines.items()}
            variants |= baselines
            backend = TorchBackend(backend.request, _Counting(backend.executor, tuple(baselines.values())))
        measurement = backend.measure(captured, variants, args.num_steps, lambda i: None)
    single_us = one_device_timeline(captured.alone).makespan_us
    return {
        "link": None if probe is None else to_builtins(ProbedLink.of(probe)),
        "load_of_others": measurement.load_of_others,
        "workers": backend.kind,
        "devices": notes,
        "peaks_measured_by": backend.peaks_measured_by,
        "left_out": left_out | refused | {c.method: c.refusal for c in contenders if c.refusal},
        "parity": parity,
        "verdict": {m: _verdict(p) for m, p in plans.items() if m in pipeline.SEARCHES},
        "rows": [_row(name, measurement, plans.get(name), single_us, peaks) for name in measurement.samples],
    }


def _row(name: str, measurement: Measurement, plan: PlanResult | None, single_us: float, peaks: dict[str, tuple[int, ...]]) -> Row:
    """One variant."""
    samples, busy_us = measurement.samples[name], list(measurement.busy_us.get(name, ()))
    predicted_us = single_us if name == SINGLE else None if plan is None else plan.predicted_step_us
    return {
        "variant": name,
        "predicted_us": predicted_us,
        "measured_us": to_builtins(samples),
        "times_eager": to_builtins(measurement.ratio("eager", name)),
        "prediction_error": None if predicted_us is None else predicted_us / samples.median - 1,
        "transfers": 0 if plan is None else len(plan.timeline.transfers),
        "bytes_moved": 0 if plan is None else plan.timeline.bytes_moved,
        "lower_bound_us": None if plan is None else plan.lower_bound_us,
        "placement_seconds": None if plan is None else plan.placement_seconds,
        "busy_us": busy_us,
        "cpu_seconds": [us / 1e6 for us in busy_us],
        "peak_memory_bytes": {
            "predicted": [] if plan is None else list(plan.timeline.peak_memory_bytes),
            "measured": list(peaks.get(name, ())),
        },
    }


def request_of(args: argparse.Namespace) -> CompareRequest:
    """The request as of `baechi compare`, whose flags most of these are, with this file's sizes of models."""
    parser = argparse.ArgumentParser()
    compare_flags.add_flags(parser)
    given = {name: getattr(args, name) for name in ("framework", "model_name", *PASSED_ON) if getattr(args, name)}
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
    methods = f"--placement_methods={','.join(args.methods or METHODS[args.framework])}"
    request = compare_flags.compare_request(parser.parse_args([*words, methods, f"--time_limit={TIME_LIMIT_SECONDS}"]))
    sizes = (SIZES_TENSORFLOW if args.framework == TENSORFLOW else SIZES).get(args.model_name, ModelOptions())
    options = replace(sizes, **dict(args.set))
    # Parts are normalised as DistributedDataParallel does it.
    return replace(request, train=replace(request.train, batch_norm_per_part=True, model_options=options, command=()))


def _verdict(result: PlanResult) -> str:
    return "it splits" if result.splits else "splitting does not pay: nothing faster than one device was found"


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


class _Counting:
    """An executor whose CPU time includes that of the baselines' workers."""

    def __init__(self, executor: Executor, baselines: Sequence[Baseline]) -> None:
        self._executor, self._baselines = executor, baselines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def cpu_seconds(self) -> float:
        return self._executor.cpu_seconds() + sum(baseline.cpu_seconds() for baseline in self._baselines)


def report(found: Row) -> str:
    return "\n".join((step_times([found]), *(f"{method}: {verdict}" for method, verdict in found["verdict"].items())))


def _option(text: str) -> tuple[str, Any]:
    """NAME=VALUE of ModelOptions."""
    name, _, value = text.partition("=")
    if name not in {field.name for field in fields(ModelOptions)}:
        raise argparse.ArgumentTypeError(f"{name!r} is no size of a model")
    return name, int(value) if value.isdigit() else value


PASSED_ON = ("num_devices", "num_gpus", "split_gpu", "use_free_memory", "cuda_graphs", "workers", "grouper", "placer_type")
FLAGS = {
    "--framework": {"choices": tuple(FRAMEWORKS), "default": "torch"},
    "--model_name": {"default": "wide_towers", "help": "; ".join(f"{name}: {', '.join(models)}" for name, models in FRAMEWORKS.items())},
    "--set": {"type": _option, "action": "append", "default": [], "metavar": "NAME=VALUE", "help": "a size, as batch_size=2"},
    "--num_steps": 30,
    "--methods": (),
    "--baselines": some_of((DDP, PIPELINE)),
    "--parts": {"type": int, "action": "append", "default": [], "metavar": "N", "help": "auto's plan of N parts of the batch, too"},
    **{
        f"--{name}": {"help": "as of baechi compare", **({"action": "store_true"} if name in ("use_free_memory", "cuda_graphs") else {})}
        for name in PASSED_ON
    },
}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Starts worker processes where such are asked for; the first of them tells."""
    find_model(args.model_name, args.framework)
    request = request_of(args)
    train = request.train
    if train.workers == "process" and train.framework != TENSORFLOW and not is_worker():
        run_workers(args.words, train.num_devices, "benchmarks.step_time")
        return
    on_devices = import_module(f"baechi_runtime.{train.framework}.backend").on_devices
    found = on_devices(train, partial(run, args, request.plans))
    if found is not None:
        yield found


main = Benchmark("step_time", __doc__, FLAGS, measure, report).main

if __name__ == "__main__":
    main()
