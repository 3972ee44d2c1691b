"""The commands that show what there is: a run's page, plots and trace, the installation; and those about learned placers. They return
exit codes."""

import argparse

from baechi_ext.datasets import read_index
from baechi_ext.errors import MissingBackendError
from baechi_runtime.cli.commands.output import report_on
from baechi_runtime.cli.flags import common as flags
from baechi_runtime.cli.flags import looking as looking_flags
from baechi_runtime.host.run_lock import locked
from baechi_runtime.report import tables
from baechi_runtime.report.progress import progress


def report(args: argparse.Namespace) -> int:
    """Writes the page of a run."""
    from baechi_runtime.report.page.writing import write_page

    with progress(f"reading {args.folder} and simulating its step"):
        path = write_page(args.folder, args.out)
    print(f"the report is {path}; open it in a browser")
    return 0


def plot(args: argparse.Namespace) -> int:
    """Writes the figures of a run."""
    from baechi_runtime.report.run_plots import write_plots

    with progress(f"plotting {args.folder}"):
        paths = write_plots(args.folder, args.out, flags.command_of(args))
    print("\n".join(map(str, paths)))
    return 0


def trace(args: argparse.Namespace) -> int:
    """Writes the trace of a run."""
    from baechi_runtime.report.trace import write_trace

    with progress(f"reading {args.folder} and simulating its step"):
        path = write_trace(args.folder, args.out, args.ranks)
    print(f"the trace is {path}; open it at https://ui.perfetto.dev or chrome://tracing")
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Says what works; 1 where nothing can be placed."""
    from baechi_runtime.cli.doctor.diagnosis import examine

    with progress("examining the installation"):
        diagnosis = examine()
    report_on(args, diagnosis.to_json, diagnosis.print)
    return 0 if diagnosis.healthy else 1


def datasets(args: argparse.Namespace) -> int:
    """Lists or makes graphs for learned placers."""
    looking_flags.check_datasets(args)
    if args.action == "list":
        folder, families = looking_flags.source_of(args)
        indexes = [read_index(family, folder) for family in families]
        report_on(args, lambda: {"families": indexes}, lambda: tables.print_families(indexes))
        return 0
    try:
        with progress("loading torch"):
            from baechi_runtime.datasets.making import make_family
    except ImportError as e:
        message = f"`baechi datasets make` captures real training steps, which needs PyTorch ({e}); pip install 'baechi-ext[torch]'"
        raise MissingBackendError(message) from e

    folder, graphs, seed = looking_flags.target_of(args)
    for family in dict.fromkeys(args.families):
        made = make_family(family, folder, graphs, seed)
        print(f"{graphs} graphs of {family} are in {folder / family}, {made} of them new")
    return 0


def placeto(args: argparse.Namespace) -> int:
    """Trains, evaluates or studies learned placers."""
    with locked({"--out": getattr(args, "out", None)}):
        report = args.act(args)
    report_on(args, report.to_json, report.print)
    return 0
