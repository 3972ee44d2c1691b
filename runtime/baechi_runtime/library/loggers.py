"""A run's numbers where a training logs its own: as scalars for TensorBoard, and in runs of Weights & Biases and MLflow, which also get the
page as an artifact."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from baechi_ext.errors import MissingBackendError, OptionError
from baechi_ext.ir.files import temporary_folder, write_text
from baechi_runtime.drivers.script_run import ScriptRun
from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.measure.samples import Samples
from baechi_runtime.report.call_report import CallReport
from baechi_runtime.report.page.data import page_data
from baechi_runtime.report.page.writing import render
from baechi_runtime.report.report import Report, Run, Sharded, Step

PREFIX = "baechi/"
PAGE = "baechi.html"
_WITHOUT_TENSORFLOW = "tensorboard.compat.notf"
"""Where there is such a module, TensorBoard does not load TensorFlow, which takes seconds and writes lines of its own."""


def log(report: CallReport, to: Any) -> None:
    """See `baechi_ext.log`."""
    if not isinstance(report, CallReport):
        raise OptionError(f"log takes the report of a placed module, baechi_ext.report(model), not a {type(report).__name__}")
    if report.result is None or report.single is None:
        raise OptionError(f"there is nothing to log of {report.name}: it is not placed{'; ' * bool(report.refusal)}{report.refusal}")
    known = {"model": report.name, "executor": "", "unplaced": "the step unplaced", "parity": None, "probe": None}
    step, plan = report.step(None, **known, peaks_measured_by="none").report(), report.result.plan
    log_step(step, to, RunFolder(Path(report.name), plan.graph, plan, None, step.to_json(), None))


def log_script(run: ScriptRun[Any], scalars: str | None) -> Iterator[str]:
    """Logs the first placed step of a script, and its page: to a folder of TensorBoard's where there is one, and where the script logs, to
    Weights & Biases' run that is open, and MLflow's that is open or was last. What a logger raises is a line: the training is over, and was
    well."""
    kept = next(iter(run.kept_steps), None)
    if kept is None:
        return
    step = run.report()
    folder = RunFolder(run.folder or Path(run.name), kept.graph, kept.plan, kept.profile, step.to_json(), kept.measured)
    finders: dict[str, Callable[[], Any]] = {"Weights & Biases": _wandb_run, "MLflow": _used_mlflow}
    if scalars is not None:
        finders["TensorBoard"] = lambda: tensorboard_writer(scalars)
    for name, find in finders.items():
        try:
            if (to := find()) is not None:
                log_step(step, to, folder)
        except Exception as e:  # noqa: BLE001 - whatever a logger raises
            yield f"{name} has logged nothing, or not all: {type(e).__name__}: {e}"


def _wandb_run() -> Any:
    run = getattr(sys.modules.get("wandb"), "run", None)
    return run if hasattr(run, "log_artifact") else None


def _used_mlflow() -> Any:
    mlflow = sys.modules.get("mlflow")
    return None if mlflow is None or _mlflow_run(mlflow) is None else mlflow


def tensorboard_writer(folder: str) -> Any:
    """PyTorch's writer of TensorBoard's files. Raises MissingBackendError where TensorBoard is not installed."""
    if "tensorflow" not in sys.modules and "://" not in folder:  # a bucket of TensorFlow's
        sys.modules.setdefault(_WITHOUT_TENSORFLOW, ModuleType(_WITHOUT_TENSORFLOW))
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        message = f"--tensorboard needs PyTorch and tensorboard ({e}); pip install 'baechi-ext[torch,plots]', or drop it"
        raise MissingBackendError(message) from e
    return SummaryWriter(folder)


def numbers_of(report: Run) -> dict[str, float]:
    """The numbers of a step: times in microseconds, speed-ups with their intervals, bytes of each device at most."""
    numbers: dict[str, float | None] = {f"step_us/{name}": samples.median for name, samples in samples_of(report).items()}
    if isinstance(report, Step):
        numbers |= {"predicted_step_us": report.predicted_step_us.placed, "predicted_speedup": report.predicted_speedup}
    for prefix, peaks in (("", report.peaks.measured), ("predicted_", report.peaks.predicted)):
        numbers |= {f"{prefix}peak_memory_bytes/{device}": peak for device, peak in enumerate(peaks or ())}
    for name, ratio in (("speedup_over_unplaced", report.over_unplaced), ("speedup_over_one_device", report.over_single)):
        if ratio is not None:
            numbers |= {name: ratio.median, f"{name}/low": ratio.low, f"{name}/high": ratio.high}
    return {PREFIX + name: float(value) for name, value in numbers.items() if value is not None}


def samples_of(report: Run) -> dict[str, Samples]:
    """The steps that were timed, by what they are: placed, eager, single; of a sharded run by the strategies' names."""
    found = report.measured_step_us if isinstance(report, Step) else {"placed": report.measured}
    if isinstance(report, Sharded):
        found = {strategy.name: strategy.measured_step_us for strategy in report.strategies}
    return {name: samples for name, samples in found.items() if samples is not None}


def log_step(report: Step, to: Any, run: RunFolder) -> None:
    """Logs a step to a SummaryWriter, a run of Weights & Biases, or `mlflow`; its page, of `run`, to the latter two. Raises OptionError for
    anything else, and what the logger raises."""
    doubts = "; ".join(report.doubts or ())
    if hasattr(to, "add_scalar"):
        log_scalars(report, to)
    elif hasattr(to, "log_artifact") and hasattr(to, "summary"):
        to.summary.update({**numbers_of(report), PREFIX + "doubts": doubts})
        with _page(run) as page:
            artifact = sys.modules["wandb"].Artifact("baechi", type="report")
            artifact.add_file(str(page))
            to.log_artifact(artifact)
    elif hasattr(to, "MlflowClient"):
        _to_mlflow(to, report, doubts, run)
    else:
        raise OptionError(f"{type(to).__name__} is no logger; give a SummaryWriter, a run of Weights & Biases, or the module mlflow")


def log_report(report: Report, folder: str) -> None:
    """Writes the numbers of steps that were run into a folder, which TensorBoard reads. Raises OptionError for another kind of report."""
    if not isinstance(report, Run):
        raise OptionError("--tensorboard is for steps that are run; drop it")
    log_scalars(report, tensorboard_writer(folder))


def log_scalars(report: Run, writer: Any) -> None:
    """Writes numbers for TensorBoard: of each timed step, and of all of them."""
    for name, value, number in _points(report):
        writer.add_scalar(name, value, number)
    if report.doubts:
        writer.add_text(PREFIX + "doubts", "; ".join(report.doubts))
    writer.flush()


def _points(report: Run) -> Iterator[tuple[str, float, int]]:
    for name, samples in samples_of(report).items():
        yield from ((f"{PREFIX}steps_us/{name}", us, number) for number, us in enumerate(samples.us))
    yield from ((name, value, 0) for name, value in numbers_of(report).items())


def _mlflow_run(mlflow: Any) -> Any:
    return mlflow.active_run() or mlflow.last_active_run()


def _to_mlflow(mlflow: Any, report: Step, doubts: str, run: RunFolder) -> None:
    """Raises OptionError where there is no run."""
    found, client = _mlflow_run(mlflow), mlflow.MlflowClient()
    if found is None:
        raise OptionError("mlflow has no run; call mlflow.start_run() first")
    for name, value, number in _points(report):
        client.log_metric(found.info.run_id, name, value, step=number)
    client.set_tag(found.info.run_id, PREFIX + "doubts", doubts)
    with _page(run) as page:
        client.log_artifact(found.info.run_id, str(page))


@contextmanager
def _page(run: RunFolder) -> Iterator[Path]:
    """The run's page in a file, as long as the body takes."""
    with temporary_folder() as folder:
        page = folder / PAGE
        write_text(page, render(page_data(run)))
        yield page
