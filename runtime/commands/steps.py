"""The commands about real steps, which load a framework: train, compare, probe-links and pase. They return exit codes."""

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baechi_ext.capture.tensorflow_private import tensorflow
from baechi_ext.errors import InfeasibleError, MissingBackendError, OptionError
from baechi_ext.ir.files import make_folder, require_writable
from runtime.as_main import require_script
from runtime.commands.output import made_by, print_json, report_on
from runtime.flags import compare as compare_flags
from runtime.flags import config as config_flags
from runtime.flags import pase as pase_flags
from runtime.flags import script as script_flags
from runtime.flags import train as train_flags
from runtime.flags.tensorflow import TENSORFLOW
from runtime.progress import progress

if TYPE_CHECKING:
    from runtime.link_report import ProbeRequest
    from runtime.pase import PaseRequest
    from runtime.train_request import TrainRequest


def train(args: argparse.Namespace) -> int:
    """Places, runs and times a step, or runs a script placed, whose exit code it returns."""
    if args.script is not None:
        return _train_script(args)
    if args.script_args is not None:
        raise OptionError("what follows -- are the arguments of a script; name the script before it: baechi train SCRIPT -- ARGUMENTS")
    request = train_flags.request_of(args)
    with progress(f"loading {request.framework}"):
        train = _stage(request.framework, "sharding.training" if request.sharding else "training").train
        start_workers = _wants_workers(request)
    _keep_config(args)
    if start_workers:
        return _run_workers(args, request)
    try:
        outcome = train(request)
    except InfeasibleError as e:
        if args.json:
            print_json(args, e.to_json())
        raise
    if outcome is None:
        return 0
    if args.costgen and not args.json:
        print(f"costs of {len(outcome.ops)} ops written to {request.costs_file}")
    else:
        report_on(args, outcome.to_json, (lambda: print("\n".join(outcome.lines()))) if request.sharding else outcome.print)
    return 0


def _train_script(args: argparse.Namespace) -> int:
    asked = script_flags.request_of(args)
    framework = asked.request.framework
    with progress(f"loading {framework}"):
        run_script = _stage(framework, "script" if framework == TENSORFLOW else "calls.script").run_script
        start_workers = _wants_workers(asked.request)
    _keep_config(args)
    if start_workers:
        return _run_workers(args, asked.request)
    run = run_script(asked)
    if args.json and run.reports:
        print_json(args, run.to_json())
    if run.code is not None and not isinstance(run.code, int):
        print(run.code, file=sys.stderr)
        return 1
    return int(run.code or 0)


def compare(args: argparse.Namespace) -> int:
    """Measures what several methods make of a step."""
    if args.script is None and args.script_args is not None:
        raise OptionError("what follows -- are the arguments of a script; name the script before it: baechi compare SCRIPT -- ARGUMENTS")
    request = compare_flags.request_of(args)
    with progress(f"loading {request.train.framework}"):
        of_script = "comparing_script" if request.train.framework == TENSORFLOW else "calls.comparing"
        stage = _stage(request.train.framework, "comparing" if args.script is None else of_script)
        start_workers = _wants_workers(request.train)
    _keep_config(args, "compare")
    if start_workers:
        return _run_workers(args, request.train)
    if args.script is None:
        comparison = stage.compare(request)
    else:
        comparison = stage.compare_script(request, args.script, tuple(args.script_args or ()))
    if comparison is not None:
        from runtime.compare.plots import show

        report_on(args, comparison.to_json, lambda: show(comparison))
    return 0


def probe(args: argparse.Namespace) -> int:
    """Measures links."""
    for path in (args.out, args.samples):
        if path is not None:
            require_writable(path)
    request = train_flags.probe_request_of(args)
    with progress(f"loading {request.framework}"):
        probe_links = _stage(request.framework, "probe_links").probe_links
        start_workers = _wants_workers(request)
    if start_workers:
        return _run_workers(args, request)
    report = probe_links(request)
    if report is not None:
        report_on(args, report.to_json, lambda: print("\n".join(report.lines())))
    return 0


def pase(args: argparse.Namespace) -> int:
    """Finds the best way to split layers."""
    request = pase_flags.request_of(args)
    from runtime.pase import run

    model = _captured_model(args, request)
    with progress(f"sharding {request.graph} over {request.machine.devices} devices"):
        report = run(request, model)
    report_on(args, report.to_json, lambda: print("\n".join(report.lines())))
    return 0


def _captured_model(args: argparse.Namespace, request: "PaseRequest") -> Any:
    """What `baechi pase` captures; None for a graph by hand."""
    if args.script is not None:
        require_script(args.script)
        with progress("loading torch"):
            script_model = _stage("torch", "calls.sharded_script").script_model
        return script_model(args.script, tuple(args.script_args or ()), splits_images=request.splits_images)
    if request.model_options is None:
        return None
    with progress(f"capturing the training step of {request.graph}"):
        model_of = _stage("torch", "sharding.models").model_of
        return model_of(
            request.graph,
            request.model_options,
            splits_images=request.splits_images,
            cost_path=request.cost_path,
            tera_flops=request.machine.tera_flops,
        )


def _keep_config(args: argparse.Namespace, command: str = "train") -> None:
    if args.out is not None:
        make_folder(Path(args.out))
        config_flags.keep(Path(args.out), command, args, made_by(args))


def _stage(framework: str, name: str) -> Any:
    """The framework's module of that name; loads the framework. Raises MissingBackendError where it is not installed."""
    if framework == TENSORFLOW:
        tensorflow()
    try:
        return import_module(f"runtime.tensorflow.{name}" if framework == TENSORFLOW else f"runtime.{name}")
    except ModuleNotFoundError as e:
        if e.name not in (framework, "keras"):
            raise
        extra = "tensorflow-cpu" if framework == TENSORFLOW else framework
        message = f"--framework={framework} needs {e.name}, which is not installed; pip install 'baechi-ext[{extra}]'"
        raise MissingBackendError(message) from e


def _wants_workers(request: "TrainRequest | ProbeRequest") -> bool:
    """Whether PyTorch's worker processes have to be started, of which this is none."""
    if request.framework == TENSORFLOW or request.workers != "process":
        return False
    from runtime.processes.worker_group import is_worker

    return not is_worker()


def _run_workers(args: argparse.Namespace, request: "TrainRequest | ProbeRequest") -> int:
    """Runs this very command on one worker per device."""
    from runtime.processes.launch import run_workers
    from runtime.torch_devices import cuda_workers

    if request.cuda:
        cuda_workers(request.num_devices)  # raises where there are too few, before any is started
    return run_workers(args.command_line, request.num_devices, request.timeout_seconds)
