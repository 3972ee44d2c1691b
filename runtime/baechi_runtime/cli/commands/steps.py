"""The commands about real steps, which load a framework: train, compare, probe-links and pase. They return exit codes."""

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baechi_ext import hybrid
from baechi_ext.capture.tensorflow_private import tensorflow
from baechi_ext.collector import importing
from baechi_ext.errors import InfeasibleError, MissingBackendError, OptionError
from baechi_ext.ir.files import make_folder, require_writable
from baechi_runtime.cli.commands.output import made_by, print_json, report_on
from baechi_runtime.cli.flags import compare as compare_flags
from baechi_runtime.cli.flags import config as config_flags
from baechi_runtime.cli.flags import pase as pase_flags
from baechi_runtime.cli.flags import probe as probe_flags
from baechi_runtime.cli.flags import train as train_flags
from baechi_runtime.cli.flags.train import TENSORFLOW
from baechi_runtime.host.as_main import require_script
from baechi_runtime.host.run_lock import locked
from baechi_runtime.report.progress import progress
from baechi_runtime.torch.processes.environment import is_worker
from baechi_runtime.torch.processes.launch import run_workers

if TYPE_CHECKING:
    from baechi_ext.cost import Profile
    from baechi_runtime.drivers.comparison import CompareRequest
    from baechi_runtime.drivers.train_request import ScriptRequest, TrainRequest
    from baechi_runtime.report.link_report import ProbeRequest
    from baechi_runtime.report.report import Report


_OF_CALLS = ("script", "comparing")
"""Stages about a script's calls, which are in a folder of each framework's."""


def train(args: argparse.Namespace) -> int:
    """Places, runs and times a step, or runs a script placed, whose exit code it returns."""
    _require_named_script(args, "train")
    asked = None if args.script is None else train_flags.script_request(args)
    request = train_flags.train_request(args) if asked is None else asked.request
    _require_script_file(args)
    with locked(_folders_of(args, request)):
        return _train(args, request, asked)


def _train(args: argparse.Namespace, request: "TrainRequest", asked: "ScriptRequest | None") -> int:
    from baechi_runtime.drivers.ranking import is_ranked
    from baechi_runtime.drivers.training import train as train_on

    if _wants_workers(request):
        return _run_workers(request)
    ranks = asked is None and is_ranked(request)
    with progress(f"loading {request.framework}"):
        of_model = "sharding.training" if request.sharding else "sharding.ranked" if ranks else "backend"
        stage = _stage(request.framework, "script" if asked is not None else of_model)
        splits = _stage("torch", "sharding.ops").sharding_of_captured if asked is None and _shares_layers(request) else None
    _keep_config(args, request)
    if asked is not None:
        return _code_of(args, stage.run_script(asked))
    try:
        outcome: Report | Profile | None
        engines = stage.TorchEngines if ranks else None
        outcome = stage.train(request) if request.sharding else train_on(request, stage.on_devices, splits, engines)
    except InfeasibleError as e:
        if args.json:
            print_json(args, e.to_json())
        raise
    if outcome is not None:
        _say_outcome(args, outcome, request.costs_file)
    return 0


def _say_outcome(args: argparse.Namespace, outcome: "Report | Profile", costs_file: str) -> None:
    from baechi_ext.cost import Profile

    if not isinstance(outcome, Profile):
        report_on(args, outcome.to_json, outcome.print)
    elif args.json:
        print_json(args, outcome.to_json())
    else:
        print(f"costs of {len(outcome.ops)} ops written to {costs_file}")


def _shares_layers(request: "TrainRequest") -> bool:
    return request.plan.method == hybrid.METHOD and request.framework != TENSORFLOW


def _code_of(args: argparse.Namespace, run: Any) -> int:
    """The exit code of a script, whose run is printed where --json asks for it."""
    if args.json and run.reports:
        print_json(args, run.to_json())
    if run.code is not None and not isinstance(run.code, int):
        print(run.code, file=sys.stderr)
        return 1
    return int(run.code or 0)


def compare(args: argparse.Namespace) -> int:
    """Measures what several methods make of a step."""
    _require_named_script(args, "compare")
    request = compare_flags.compare_request(args)
    _require_script_file(args)
    with locked(_folders_of(args, request.train)):
        return _compare(args, request)


def _compare(args: argparse.Namespace, request: "CompareRequest") -> int:
    from baechi_runtime.drivers.comparing import compare as compare_on

    if _wants_workers(request.train):
        return _run_workers(request.train)
    with progress(f"loading {request.train.framework}"):
        stage = _stage(request.train.framework, "backend" if args.script is None else "comparing")
    _keep_config(args, request.train, "compare")
    if args.script is None:
        comparison = compare_on(request, stage.on_devices)
    else:
        comparison = stage.compare_script(request, args.script, tuple(args.script_args or ()))
    if comparison is not None:
        from baechi_runtime.drivers.compare_plots import show

        report_on(args, comparison.to_json, lambda: show(comparison))
    return 0


def probe(args: argparse.Namespace) -> int:
    """Measures links."""
    for path in (args.out, args.samples):
        if path is not None:
            require_writable(path)
    request = probe_flags.probe_request(args)
    if _wants_workers(request):
        return _run_workers(request)
    with progress(f"loading {request.framework}"):
        probe_links = _stage(request.framework, "probe_links").probe_links
    report = probe_links(request)
    if report is not None:
        report_on(args, report.to_json, report.print)
    return 0


def pase(args: argparse.Namespace) -> int:
    """Finds the best way to split layers."""
    request = pase_flags.pase_request(args)
    _require_script_file(args)
    from baechi_runtime.sharding.pase import run

    model = None
    if request.script is not None or request.model_options is not None:
        with progress("loading torch"):
            captured_model = _stage("torch", "sharding.models").captured_model
        model = captured_model(request)
    with progress(f"sharding {request.graph} over {request.machine.devices} devices"):
        report = run(request, model)
    report_on(args, report.to_json, report.print)
    return 0


def _require_named_script(args: argparse.Namespace, command: str) -> None:
    """Raises OptionError for arguments of a script that is not named."""
    if args.script is None and args.script_args is not None:
        usage = f"baechi {command} SCRIPT -- ARGUMENTS"
        raise OptionError(f"what follows -- are the arguments of a script; name the script before it: {usage}")


def _require_script_file(args: argparse.Namespace) -> None:
    """Raises FileError for a script that is not there, before a framework is loaded for it."""
    if args.script is not None:
        require_script(args.script)


def _drives(request: "TrainRequest") -> bool:
    """True unless another process of the same run writes its files."""
    return request.task_index == 0 and (request.workers != "process" or os.environ.get("RANK", "0") == "0")


def _folders_of(args: argparse.Namespace, request: "TrainRequest") -> dict[str, str | None]:
    """The folders that this process writes into, by their flags."""
    checkpoint = None if request.run is None else request.run.checkpoint
    return {"--out": args.out, "--checkpoint": checkpoint} if _drives(request) else {}


def _keep_config(args: argparse.Namespace, request: "TrainRequest", command: str = "train") -> None:
    if args.out is not None and _drives(request):
        make_folder(Path(args.out))
        config_flags.keep(Path(args.out), command, args, made_by(args))


def _stage(framework: str, name: str) -> Any:
    """The framework's module of that name; loads the framework. Raises MissingBackendError where it is not installed."""
    try:
        with importing():
            if framework == TENSORFLOW:
                tensorflow()
            folder = "calls." if name in _OF_CALLS else ""
            return import_module("baechi_runtime." + (name if "." in name else f"{framework}.{folder}{name}"))
    except ModuleNotFoundError as e:
        if e.name not in (framework, "keras"):
            raise
        extra = "tensorflow-cpu" if framework == TENSORFLOW else framework
        message = f"--framework={framework} needs {e.name}, which is not installed; pip install 'baechi-ext[{extra}]'"
        raise MissingBackendError(message) from e


def _wants_workers(request: "TrainRequest | ProbeRequest") -> bool:
    """True if this process must launch PyTorch's worker processes."""
    return request.framework != TENSORFLOW and request.workers == "process" and not is_worker()


def _run_workers(request: "TrainRequest | ProbeRequest") -> int:
    """Runs this very command on one worker per device."""
    if request.cuda:
        _stage("torch", "torch.lowering.devices").cuda_workers(request.num_devices)  # raises where there are too few, before any starts
    return run_workers(request.command[1:], request.num_devices)
