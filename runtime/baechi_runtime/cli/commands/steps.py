"""The commands about real steps, which load a framework: train, compare, probe-links and pase. They return exit codes."""

import os
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from baechi_ext import hybrid
from baechi_runtime.cli.commands.output import Output
from baechi_runtime.cli.commands.planning import plan_elsewhere
from baechi_runtime.cli.commands.stages import stage_of
from baechi_runtime.cli.flags.train import TENSORFLOW
from baechi_runtime.drivers.train_request import DevicesRequest, HardwareRequest, ScriptRequest, TrainRequest
from baechi_runtime.host.run_lock import locked
from baechi_runtime.report.progress import progress
from baechi_runtime.torch.processes.environment import is_worker
from baechi_runtime.torch.processes.launch import run_workers

if TYPE_CHECKING:
    from baechi_runtime.drivers.comparison import CompareRequest
    from baechi_runtime.drivers.link_report import ProbeRequest
    from baechi_runtime.sharding.pase import PaseRequest


def train(request: TrainRequest | ScriptRequest | HardwareRequest, output: Output) -> int:
    """Places, runs and times a step, or runs a script placed, whose exit code it returns; or plans a step for hardware that is not here."""
    of_step = request if isinstance(request, TrainRequest) else request.request
    with locked(_folders_of(of_step)):
        if isinstance(request, HardwareRequest):
            return plan_elsewhere(request, output)
        if _wants_workers(of_step):
            return _run_workers(of_step)
        stage = stage_of(of_step.framework, _module_of(request))
        _keep_settings(of_step, output, "train")
        return _run_script(request, stage, output) if isinstance(request, ScriptRequest) else _train(request, stage, output)


def _module_of(request: TrainRequest | ScriptRequest) -> str:
    """The module of baechi_runtime that runs it."""
    if isinstance(request, ScriptRequest):
        return f"{request.request.framework}.calls.script"
    return "sharding.training" if request.sharding else "sharding.ranked" if request.is_ranked else f"{request.framework}.backend"


def _run_script(asked: ScriptRequest, stage: Any, output: Output) -> int:
    """The exit code of a script, whose run is printed where --json asks for it."""
    run = stage.run_script(asked)
    if run.reports:
        from baechi_runtime.library.loggers import log_script

        for line in log_script(run, output.logs):
            print(f"baechi: {line}", file=sys.stderr)
        if output.json:
            output.print_json(run.report())
    if run.code is not None and not isinstance(run.code, int):
        print(run.code, file=sys.stderr)
        return 1
    return int(run.code or 0)


def _train(request: TrainRequest, stage: Any, output: Output) -> int:
    from baechi_runtime.drivers.training import placed
    from baechi_runtime.drivers.training import train as train_on

    shares_layers = request.plan.method == hybrid.METHOD and request.framework != TENSORFLOW
    splits = stage_of("torch", "sharding.ops").sharding_of if shares_layers else None
    with output.infeasible_printed():
        engines = stage.TorchEngines if request.is_ranked else None
        drive = stage.split if request.sharding else partial(placed, sharding_of=splits, engines_of=engines)
        report = train_on(request, stage.on_devices, drive)
    _report_on(report, output)
    return 0


def compare(request: "CompareRequest", output: Output) -> int:
    """Measures what several methods make of a step."""
    from baechi_runtime.drivers.comparing import compare as compare_on
    from baechi_runtime.drivers.comparison import AUTO

    auto = request.plans.get(AUTO)
    of_model = request.train if auto is None else replace(request.train, plan=auto)
    with locked(_folders_of(request.train)):
        if _wants_workers(request.train):
            return _run_workers(request.train)
        framework = request.train.framework
        stage = stage_of(framework, _module_of(of_model) if request.script is None else f"{framework}.calls.comparing")
        _keep_settings(request.train, output, "compare")
        if request.script is None:
            comparison = compare_on(request, stage.on_devices, stage.TorchEngines if of_model.is_ranked else None)
        else:
            comparison = stage.compare_script(request, request.script, request.script_arguments)
        _report_on(comparison, output)
    return 0


def probe(request: "ProbeRequest", output: Output) -> int:
    """Measures links."""
    if _wants_workers(request):
        return _run_workers(request)
    probe_links = stage_of(request.framework, f"{request.framework}.probe_links").probe_links
    _report_on(probe_links(request), output)
    return 0


def pase(request: "PaseRequest", output: Output) -> int:
    """Finds the best way to split layers."""
    from baechi_runtime.sharding.pase import run

    model = None
    if request.script is not None or request.model_options is not None:
        model = stage_of("torch", "sharding.models").captured_model(request)
    with progress(f"sharding {request.graph} over {request.machine.devices} devices"):
        report = run(request, model)
    _report_on(report, output)
    return 0


def _report_on(report: Any, output: Output) -> None:
    """Prints a report; None is that of a process that leaves it to another one."""
    if report is not None:
        output.report(report.report, report.print)


def _drives(request: TrainRequest) -> bool:
    """True unless another process of the same run writes its files."""
    return request.task_index == 0 and (request.workers != "process" or os.environ.get("RANK", "0") == "0")


def _folders_of(request: TrainRequest) -> dict[str, str | None]:
    """The folders that this process writes into, by their flags."""
    checkpoint = None if request.run is None else request.run.checkpoint
    return {"--out": request.out, "--checkpoint": checkpoint} if _drives(request) else {}


def _keep_settings(request: TrainRequest, output: Output, command: str) -> None:
    if _drives(request):
        output.keep_settings(request.out, command)


def _wants_workers(request: DevicesRequest) -> bool:
    """True if this process must launch PyTorch's worker processes."""
    return request.framework != TENSORFLOW and request.workers == "process" and not is_worker()


def _run_workers(request: DevicesRequest) -> int:
    """Runs this very command on one worker per device."""
    if request.cuda:
        stage_of("torch", "torch.lowering.devices").cuda_workers(request.num_devices)  # raises where there are too few, before any starts
    return run_workers(request.command[1:], request.num_devices)
