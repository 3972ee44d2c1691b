"""The commands about real steps, which load a framework: train, compare, probe-links and pase. They return exit codes."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baechi_ext import hybrid
from baechi_ext.ir.files import make_folder
from baechi_runtime.cli.commands.output import Output
from baechi_runtime.cli.commands.planning import infeasible_printed, report_plan
from baechi_runtime.cli.commands.stages import stage_of
from baechi_runtime.cli.flags import config as config_flags
from baechi_runtime.cli.flags.train import TENSORFLOW
from baechi_runtime.drivers.train_request import ScriptRequest, TrainRequest
from baechi_runtime.host.run_lock import locked
from baechi_runtime.report.progress import progress
from baechi_runtime.torch.processes.environment import is_worker
from baechi_runtime.torch.processes.launch import run_workers

if TYPE_CHECKING:
    from baechi_runtime.drivers.comparison import CompareRequest
    from baechi_runtime.report.link_report import ProbeRequest
    from baechi_runtime.sharding.pase import PaseRequest


def train(request: TrainRequest | ScriptRequest, output: Output) -> int:
    """Places, runs and times a step, or runs a script placed, whose exit code it returns."""
    of_step = request.request if isinstance(request, ScriptRequest) else request
    with locked(_folders_of(of_step)):
        if _wants_workers(of_step):
            return _run_workers(of_step)
        writer = None
        if of_step.tensorboard is not None and _drives(of_step):
            from baechi_runtime.library.loggers import tensorboard_writer

            writer = tensorboard_writer(of_step.tensorboard)
        return _run_script(request, output, writer) if isinstance(request, ScriptRequest) else _train(request, output, writer)


def _run_script(asked: ScriptRequest, output: Output, writer: Any) -> int:
    """The exit code of a script, whose run is printed where --json asks for it."""
    framework = asked.request.framework
    with progress(f"loading {framework}"):
        run_script = stage_of(framework, f"{framework}.calls.script").run_script
    _keep_config(asked.request, output, "train")
    run = run_script(asked)
    if run.reports:
        from baechi_runtime.library.loggers import log_script

        for line in log_script(run, writer):
            print(f"baechi: {line}", file=sys.stderr)
    if output.json and run.reports:
        output.print_json(run.report())
    if run.code is not None and not isinstance(run.code, int):
        print(run.code, file=sys.stderr)
        return 1
    return int(run.code or 0)


def _plan_only(request: TrainRequest, output: Output) -> int:
    """Plans a model's step for hardware that is not here."""
    with progress("loading torch"):
        stage = stage_of("torch", "torch.plan_only")
    _keep_config(request, output, "train")
    with infeasible_printed(output):
        placement, elsewhere = stage.plan_only(request)
    if request.out is not None:
        placement.save(Path(request.out), request.made_by)
    return report_plan(placement.result, output, request.out, elsewhere)


def _train(request: TrainRequest, output: Output, writer: Any) -> int:
    from baechi_ext.cost import Profile
    from baechi_runtime.drivers.ranking import is_ranked
    from baechi_runtime.drivers.training import train as train_on
    from baechi_runtime.report.printed import Profiled

    if request.hardware is not None:
        return _plan_only(request, output)
    framework, ranks = request.framework, is_ranked(request)
    with progress(f"loading {framework}"):
        stage = stage_of(framework, "sharding.training" if request.sharding else "sharding.ranked" if ranks else f"{framework}.backend")
        shares_layers = request.plan.method == hybrid.METHOD and framework != TENSORFLOW
        splits = stage_of("torch", "sharding.ops").sharding_of_captured if shares_layers else None
    _keep_config(request, output, "train")
    with infeasible_printed(output):
        if request.sharding:
            outcome = stage.train(request)
        else:
            outcome = train_on(request, stage.on_devices, splits, stage.TorchEngines if ranks else None)
    if not isinstance(outcome, Profile):
        _report_on(outcome, output)
        if writer is not None and outcome is not None:
            from baechi_runtime.library.loggers import log_scalars

            log_scalars(outcome.report(), writer)
    elif output.json:
        output.print_json(Profiled(**outcome.to_json()))
    else:
        print(f"costs of {len(outcome.ops)} ops written to {request.costs_file}")
    return 0


def compare(request: "CompareRequest", output: Output) -> int:
    """Measures what several methods make of a step."""
    from baechi_runtime.drivers.comparing import compare as compare_on
    from baechi_runtime.drivers.comparison import AUTO
    from baechi_runtime.drivers.ranking import is_ranked

    framework, auto = request.train.framework, request.plans.get(AUTO)
    ranks = request.script is None and auto is not None and is_ranked(replace(request.train, plan=auto))
    with locked(_folders_of(request.train)):
        if _wants_workers(request.train):
            return _run_workers(request.train)
        with progress(f"loading {framework}"):
            of_model = "sharding.ranked" if ranks else f"{framework}.backend"
            stage = stage_of(framework, of_model if request.script is None else f"{framework}.calls.comparing")
        _keep_config(request.train, output, "compare")
        if request.script is None:
            comparison = compare_on(request, stage.on_devices, stage.TorchEngines if ranks else None)
        else:
            comparison = stage.compare_script(request, request.script, request.script_arguments)
        if comparison is not None:
            from baechi_runtime.drivers.compare_plots import show

            output.report(comparison.report, lambda: show(comparison))
    return 0


def probe(request: "ProbeRequest", output: Output) -> int:
    """Measures links."""
    if _wants_workers(request):
        return _run_workers(request)
    with progress(f"loading {request.framework}"):
        probe_links = stage_of(request.framework, f"{request.framework}.probe_links").probe_links
    _report_on(probe_links(request), output)
    return 0


def pase(request: "PaseRequest", output: Output) -> int:
    """Finds the best way to split layers."""
    from baechi_runtime.sharding.pase import run

    model = None
    if request.script is not None or request.model_options is not None:
        with progress("loading torch"):
            captured_model = stage_of("torch", "sharding.models").captured_model
        model = captured_model(request)
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


def _keep_config(request: TrainRequest, output: Output, command: str) -> None:
    if request.out is not None and _drives(request):
        make_folder(Path(request.out))
        config_flags.keep(Path(request.out), command, output.settings, output.made_by)


def _wants_workers(request: "TrainRequest | ProbeRequest") -> bool:
    """True if this process must launch PyTorch's worker processes."""
    return request.framework != TENSORFLOW and request.workers == "process" and not is_worker()


def _run_workers(request: "TrainRequest | ProbeRequest") -> int:
    """Runs this very command on one worker per device."""
    if request.cuda:
        stage_of("torch", "torch.lowering.devices").cuda_workers(request.num_devices)  # raises where there are too few, before any starts
    return run_workers(request.command[1:], request.num_devices)
