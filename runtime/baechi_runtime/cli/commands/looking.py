"""The commands that show what there is: a run's page, plots and trace, the installation; and those about learned placers. They return
exit codes."""

from baechi_ext.datasets import read_index
from baechi_ext.errors import MissingBackendError
from baechi_runtime.cli.commands.output import Output
from baechi_runtime.cli.flags.looking import DatasetsRequest, ShowRequest
from baechi_runtime.cli.flags.placeto import PlacetoRequest
from baechi_runtime.host.run_lock import locked
from baechi_runtime.report import tables
from baechi_runtime.report.progress import progress


def report(request: ShowRequest, output: Output) -> int:
    """Writes the page of a run."""
    from baechi_runtime.report.page.writing import write_page

    with progress(f"reading {request.folder} and simulating its step"):
        path = write_page(request.folder, request.out)
    print(f"the report is {path}; open it in a browser")
    return 0


def plot(request: ShowRequest, output: Output) -> int:
    """Writes the figures of a run."""
    from baechi_runtime.report.run_plots import write_plots

    with progress(f"plotting {request.folder}"):
        paths = write_plots(request.folder, request.out, output.command)
    print("\n".join(map(str, paths)))
    return 0


def trace(request: ShowRequest, output: Output) -> int:
    """Writes the trace of a run."""
    from baechi_runtime.report.trace import write_trace

    with progress(f"reading {request.folder} and simulating its step"):
        path = write_trace(request.folder, request.out, request.ranks)
    print(f"the trace is {path}; open it at https://ui.perfetto.dev or chrome://tracing")
    return 0


def doctor(request: None, output: Output) -> int:
    """Says what works; 1 where nothing can be placed."""
    from baechi_runtime.cli.doctor.diagnosis import examine

    with progress("examining the installation"):
        diagnosis = examine()
    output.report(diagnosis.report, diagnosis.print)
    return 0 if diagnosis.healthy else 1


def datasets(request: DatasetsRequest, output: Output) -> int:
    """Lists or makes graphs for learned placers."""
    if not request.graphs:
        from baechi_runtime.report.printed import DataSets

        indexes = [read_index(family, request.folder) for family in request.families]
        output.report(lambda: DataSets(families=indexes), lambda: tables.print_families(indexes))
        return 0
    try:
        with progress("loading torch"):
            from baechi_runtime.datasets.making import make_family
    except ImportError as e:
        message = f"`baechi datasets make` captures real training steps, which needs PyTorch ({e}); pip install 'baechi-ext[torch]'"
        raise MissingBackendError(message) from e

    with locked({"--out": request.folder}):
        for family in request.families:
            made = make_family(family, request.folder, request.graphs, request.seed)
            print(f"{request.graphs} graphs of {family} are in {request.folder / family}, {made} of them new")
    return 0


def placeto(request: PlacetoRequest, output: Output) -> int:
    """Trains, evaluates or studies learned placers."""
    with locked({"--out": request.out}):
        report = request.run()
    output.report(report.report, report.print)
    return 0
