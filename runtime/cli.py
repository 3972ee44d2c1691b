"""The `baechi` command: one sub-command a stage. Here are arguments and exit codes; the stages are in the modules it calls.

Exit codes: 0 done, 1 a library error, 2 a usage error, 130 interrupted, 141 nobody reads the output. Every error is one
`error:` line on stderr. Results go to stdout, progress to stderr.
"""

import argparse
import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import baechi_ext
from baechi_ext.capture.tensorflow_private import tensorflow
from baechi_ext.datasets import read_index
from baechi_ext.errors import BaechiError, InfeasibleError, MissingBackendError, OptionError
from baechi_ext.ir import Cluster, OpGraph, Plan
from baechi_ext.ir.files import make_folder, require_writable
from baechi_ext.ir.made_by import MadeBy, signed
from runtime import pipeline, tables
from runtime.as_main import require_script
from runtime.doctor.packages import CORE_MODULES
from runtime.exports import export
from runtime.flags import baechi as baechi_flags
from runtime.flags import common as flags
from runtime.flags import compare as compare_flags
from runtime.flags import config as config_flags
from runtime.flags import datasets as dataset_flags
from runtime.flags import explain as explain_flags
from runtime.flags import export as export_flags
from runtime.flags import pase as pase_flags
from runtime.flags import placeto as placeto_flags
from runtime.flags import report as report_flags
from runtime.flags import script as script_flags
from runtime.flags import trace as trace_flags
from runtime.flags import train as train_flags
from runtime.flags.parser import Lines, Parser, with_underscores
from runtime.flags.tensorflow import TENSORFLOW
from runtime.progress import progress, restore_terminal

if TYPE_CHECKING:
    from runtime.link_report import ProbeRequest
    from runtime.pase import PaseRequest
    from runtime.train_request import TrainRequest


@dataclass(frozen=True)
class Command:
    """A sub-command: `run` takes the parsed arguments and returns the exit code; library errors may escape it."""

    name: str
    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _place_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", metavar="GRAPH", help="a graph file; see docs/files.md")
    flags.add_placing_flags(parser)
    flags.add_cluster_flags(parser)
    config_flags.add_flag(parser)
    flags.add_output_flags(parser, out="write the plan to this file")


def _read(graph: str | Path) -> OpGraph:
    with progress(f"reading {graph}"):
        return OpGraph.load(graph)


def _place(args: argparse.Namespace) -> int:
    request, cluster = flags.request_of(args), flags.placers_view(args, flags.cluster_of(args))
    if args.out is not None:
        require_writable(args.out)
    graph = _read(args.graph)
    try:
        with progress(pipeline.announcement(graph, cluster, request)) as show:
            result = pipeline.plan(graph, cluster, request.watched(lambda search: show(tables.search_news(search))))
    except InfeasibleError as e:
        if args.json:
            _print_json(args, e.to_json())
        raise
    if args.out is not None:
        result.plan.save(args.out, _made_by(args))
    timeline = result.timeline
    known = {"busy_us": timeline.busy_us, "transfers": len(timeline.transfers), "notes": list(result.notes)}
    facts = {
        "method": f"{result.plan.method} ({result.status}, {result.placement_seconds:.3g} s)",
        "plan": args.out or "not written (no --out)",
    }
    if request.method in pipeline.SEARCHES and len(cluster) > 1 and not result.splits:
        facts["verdict"] = result.why_whole
    if result.notes:
        facts["note"] = "; ".join(result.notes)
    print_text = partial(tables.print_timeline, timeline, result.lower_bound_us, facts)
    _report_on(args, lambda: {**result.plan.to_json(), **known}, print_text)
    if result.interrupted:
        return _fail("interrupted; this is the best plan found until then", 130)
    return 0


def _simulate(args: argparse.Namespace) -> int:
    from runtime.simulating import WhatIf, simulated

    graph, given = _read(args.graph), None if args.cluster is None else Cluster.load(args.cluster)
    factors = args.comm_cost_factor, args.cost_factor, args.seed
    asked = WhatIf(args.plan, given, lambda cluster: flags.cluster_of(args, cluster), *factors, tuple(args.pin))
    with progress(f"simulating {len(graph)} ops"):
        report = simulated(graph, asked)
    _report_on(args, report.to_json, report.print)
    return 0


def _explain(args: argparse.Namespace) -> int:
    from baechi_ext.explain import explain_plan, op_choices
    from baechi_ext.hybrid.plan import load_plan
    from runtime.explaining import print_choices, print_explanation
    from runtime.plan_files import as_planned, on_devices, other_costs, plan_and_graph, shard_plan_at

    sharded = shard_plan_at(args.plan)
    if sharded is not None:
        from runtime.sharded_plans import explain_sharded

        _report_on(args, *explain_sharded(sharded, args.op))
        return 0
    plan_file, graph_file = plan_and_graph(args.plan, args.graph)
    with progress(f"reading {plan_file} and its graph"):
        graph = OpGraph.load(graph_file)
        plan = load_plan(plan_file, graph, None if args.cluster is None else Cluster.load(args.cluster))
    plan = on_devices(plan.on(flags.cluster_of(args, plan.cluster)))
    with progress(f"explaining a plan of {len(graph)} ops"):
        choices = None if args.op is None else op_choices(plan, args.op)
        explained = explain_plan(plan) if choices is None else None
        notes = other_costs(as_planned(plan_file, graph))
    if explained is not None:
        print_text = partial(print_explanation, explained, notes)
    else:
        print_text = partial(print_choices, choices, args.op, plan.cluster, notes)
    _report_on(args, lambda: {**(explained or choices).to_json(), "notes": list(notes)}, print_text)
    return 0


def _diff(args: argparse.Namespace) -> int:
    from baechi_ext.explain import diff_plans
    from baechi_ext.hybrid.plan import load_plan
    from runtime.comparing_plans import print_diff
    from runtime.plan_files import on_devices, plan_and_graph, shard_plan_at

    sharded = shard_plan_at(args.before), shard_plan_at(args.after)
    if any(sharded):
        from runtime.sharded_plans import diff_sharded

        _report_on(args, *diff_sharded((args.before, sharded[0]), (args.after, sharded[1])))
        return 0
    before, graph_file = plan_and_graph(args.before, args.graph)
    after, _ = plan_and_graph(args.after, str(graph_file))
    graph = _read(graph_file)
    with progress(f"comparing two plans of {len(graph)} ops"):
        diff = diff_plans(*(on_devices(load_plan(file, graph)) for file in (before, after)))
    _report_on(args, diff.to_json, lambda: print_diff(diff))
    return 0


def _export(args: argparse.Namespace) -> int:
    plan = Plan.load(args.plan, _read(args.graph))
    with progress(f"exporting a plan of {len(plan.graph)} ops as {args.format}"):
        exported = export(plan, args.format, _made_by(args))
    if args.out is not None:
        exported.save(args.out)
    lines = [*exported.lines, f"written to      {args.out or 'nothing (no --out)'}"]
    _report_on(args, lambda: exported.said, lambda: print("\n".join(lines)))
    return 0


def _trace(args: argparse.Namespace) -> int:
    from runtime.trace import write_trace

    with progress(f"reading {args.folder} and simulating its step"):
        path = write_trace(args.folder, args.out, args.ranks)
    print(f"the trace is {path}; open it at https://ui.perfetto.dev or chrome://tracing")
    return 0


def _train(args: argparse.Namespace) -> int:
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
            _print_json(args, e.to_json())
        raise
    if outcome is None:
        return 0
    if args.costgen and not args.json:
        print(f"costs of {len(outcome.ops)} ops written to {request.costs_file}")
    else:
        _report_on(args, outcome.to_json, (lambda: print("\n".join(outcome.lines()))) if request.sharding else outcome.print)
    return 0


def _keep_config(args: argparse.Namespace, command: str = "train") -> None:
    if args.out is not None:
        make_folder(Path(args.out))
        config_flags.keep(Path(args.out), command, args, _made_by(args))


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
        _print_json(args, run.to_json())
    if run.code is not None and not isinstance(run.code, int):
        print(run.code, file=sys.stderr)
        return 1
    return int(run.code or 0)


def _probe(args: argparse.Namespace) -> int:
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
        _report_on(args, report.to_json, lambda: print("\n".join(report.lines())))
    return 0


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


def _datasets(args: argparse.Namespace) -> int:
    dataset_flags.check(args)
    if args.action == "list":
        folder, families = dataset_flags.source_of(args)
        indexes = [read_index(family, folder) for family in families]
        _report_on(args, lambda: {"families": indexes}, lambda: tables.print_families(indexes))
        return 0
    try:
        with progress("loading torch"):
            from runtime.datasets.making import make_family
    except ImportError as e:
        message = f"`baechi datasets make` captures real training steps, which needs PyTorch ({e}); pip install 'baechi-ext[torch]'"
        raise MissingBackendError(message) from e

    folder, graphs, seed = dataset_flags.target_of(args)
    for family in dict.fromkeys(args.families):
        made = make_family(family, folder, graphs, seed)
        print(f"{graphs} graphs of {family} are in {folder / family}, {made} of them new")
    return 0


def _placeto(args: argparse.Namespace) -> int:
    report = args.act(args)
    _report_on(args, report.to_json, lambda: print("\n".join(report.lines())))
    return 0


def _report(args: argparse.Namespace) -> int:
    from runtime.report_page.writing import write_page

    with progress(f"reading {args.folder} and simulating its step"):
        path = write_page(args.folder, args.out)
    print(f"the report is {path}; open it in a browser")
    return 0


def _plot(args: argparse.Namespace) -> int:
    from runtime.run_plots import write_plots

    with progress(f"plotting {args.folder}"):
        paths = write_plots(args.folder, args.out, flags.command_of(args))
    print("\n".join(map(str, paths)))
    return 0


def _pase(args: argparse.Namespace) -> int:
    request = pase_flags.request_of(args)
    from runtime.pase import run

    model = _captured_model(args, request)
    with progress(f"sharding {request.graph} over {request.machine.devices} devices"):
        report = run(request, model)
    _report_on(args, report.to_json, lambda: print("\n".join(report.lines())))
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


def _compare(args: argparse.Namespace) -> int:
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

        _report_on(args, comparison.to_json, lambda: show(comparison))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from runtime.doctor.diagnosis import examine

    with progress("examining the installation"):
        diagnosis = examine()
    _report_on(args, diagnosis.to_json, lambda: print("\n".join(diagnosis.lines())))
    return 0 if diagnosis.healthy else 1


COMMANDS = (
    Command("place", "decide which device runs which op of a graph, and write the plan", _place_flags, _place),
    Command("train", "place a real training step, run it on several devices, and time it", train_flags.add_flags, _train),
    Command("compare", "measure steps placed by several methods, and say which is worth it", compare_flags.add_flags, _compare),
    Command("probe-links", "measure what sending costs between every pair of devices", train_flags.add_probe_flags, _probe),
    Command("datasets", "make families of graphs for learned placers, or list them", dataset_flags.add_flags, _datasets),
    Command("placeto", "train the learned placer, or compare it with the others", placeto_flags.add_flags, _placeto),
    Command("pase", "find the cheapest way to split every layer of a network over devices", pase_flags.add_flags, _pase),
    Command("trace", "write a run's timelines, predicted and measured, for Perfetto and HTA", trace_flags.add_flags, _trace),
    Command("report", "write one HTML page of a run: timelines, memory, graph and why", report_flags.add_report_flags, _report),
    Command("plot", "write a run's timelines, memory and busy shares as PNG and PDF", report_flags.add_plot_flags, _plot),
    Command("simulate", "say what a plan is worth: step, busy time, memory, broken rules", explain_flags.add_simulate_flags, _simulate),
    Command("explain", "say what bounds a plan's step, or why an op is where it is", explain_flags.add_explain_flags, _explain),
    Command("diff", "say what two plans of one graph differ in", explain_flags.add_diff_flags, _diff),
    Command("export", "write a plan in the format of another program", export_flags.add_flags, _export),
    Command("export-device-map", "the same as export --format=device_map", export_flags.add_device_map_flags, _export),
    Command("doctor", "say what of this installation works, what is missing, and what that costs", flags.add_output_flags, _doctor),
)


def _report_on(args: argparse.Namespace, as_json: Callable[[], dict[str, Any]], as_text: Callable[[], object]) -> None:
    """Prints what a command found on stdout, for programs or for people, and who made it."""
    if args.json:
        _print_json(args, as_json())
    else:
        as_text()
        print(f"made by        {_made_by(args)}")


def _print_json(args: argparse.Namespace, value: dict[str, Any]) -> None:
    print(json.dumps(signed(value, _made_by(args)), indent=1, allow_nan=False))


def _made_by(args: argparse.Namespace) -> MadeBy:
    return MadeBy(flags.command_of(args))


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = Parser(prog="baechi", description="Automatic device placement for training deep networks.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=baechi_ext.__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=command.help, allow_abbrev=False, formatter_class=Lines)
        command.add_flags(sub)
        sub.set_defaults(run=command.run, parser=sub)
    return parser


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """A command line, with what a file of --config adds to it; `run` does it. Raises OptionError, and FileError for that file."""
    words = with_underscores(argv)
    spelled = baechi_flags.with_plain_switches(words)
    own, passed = script_flags.parted(spelled)
    args = make_parser().parse_args(own)
    args.script_args, args.given = passed, config_flags.given(args.parser, own)
    if getattr(args, "config", None) is not None:
        args.revoked = baechi_flags.revoked(words)
        args = config_flags.configured(args, own[1:])
    args.command_line = spelled
    if getattr(args, "script", None) is not None:
        script_flags.anchor(args)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: this process's own) and returns its exit code."""
    try:
        args = parsed(sys.argv[1:] if argv is None else argv)
        code = args.run(args)
        sys.stdout.flush()
        return code
    except OptionError as e:
        return _fail(str(e), 2)
    except BaechiError as e:
        return _fail(str(e), 1)
    except ModuleNotFoundError as e:
        if e.name not in CORE_MODULES:
            raise
        return _fail(f"{e.name} is not installed; pip install --force-reinstall baechi-ext, or see what baechi doctor says", 1)
    except BrokenPipeError:
        _drop_stdout()
        return 141
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or e.filename is not None:
            raise
        _drop_stdout()
        return _fail(f"cannot write the result to stdout: {e.strerror or e}; choose another place for it", 1)
    except KeyboardInterrupt as e:
        restore_terminal()
        return _fail(str(e) or "interrupted", 130)
    finally:
        restore_terminal()


def _drop_stdout() -> None:
    """What is left in the buffer would complain again when python ends."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> int:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return code
