"""Results of a run that are not in its plan, from report.json, or from compare.json where there is none: read once, and checked."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baechi_ext.errors import FileError
from baechi_ext.ir.files import read_json
from baechi_ext.ir.made_by import MadeBy
from baechi_runtime.files.run_folder import COMPARISON, RunFolder
from baechi_runtime.report.fields import Interval, interval_of, list_of, number_of, numbers_of, object_of, steps_of
from baechi_runtime.report.report import parity_text

SINGLE = "single"
"""The name, in a comparison, of the step on one device."""


@dataclass(frozen=True, slots=True)
class MethodRow:
    """A method of a comparison: `samples_us` are its measured steps, `gain` is over one device."""

    name: str
    predicted_us: float | None
    median_us: float | None
    samples_us: tuple[float, ...]
    gain: Interval | None
    peaks: tuple[float, ...]
    note: str

    def to_json(self) -> dict[str, Any]:
        gain = None if self.gain is None else {"median": self.gain.median, "low": self.gain.low, "high": self.gain.high}
        steps = {"predicted_us": self.predicted_us, "median_us": self.median_us, "samples_us": list(self.samples_us)}
        return {"name": self.name, **steps, "gain": gain, "note": self.note}


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run's results; what is not known is None or empty. Times are microseconds, ratios those of the placed step."""

    model: str = ""
    executor: str = ""
    made_by: MadeBy = MadeBy(versions={})
    samples_us: tuple[float, ...] = ()
    median_us: float | None = None
    over_single: Interval | None = None
    over_eager: Interval | None = None
    unplaced: str = ""
    """The name of a script's unplaced step, which its placed one is compared with; empty for other runs."""
    unplaced_us: tuple[float, ...] = ()
    """Samples of the unplaced step."""
    interval_error: float = 0.05
    """The share of cases in which an interval may be wrong."""
    predicted_speedup: float | None = None
    measured_peaks: tuple[float, ...] = ()
    parity: str = ""
    load_of_others: float | None = None
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    recommendation: str = ""
    further: tuple[tuple[str, str], ...] = ()
    """A script's further placed steps: their names, and their folders in the run's."""

    @classmethod
    def of_report(cls, value: Mapping[str, Any]) -> "RunSummary":
        """From report.json, of one step, of a training or of a script. Raises FileError where a field is not what it should be."""
        measured = object_of(value, "measured_step_us")
        median, samples = steps_of(measured.get("placed", measured), "measured_step_us")
        return cls(
            **_common(value),
            median_us=median,
            samples_us=samples,
            over_single=interval_of(value, "speedup_interval"),
            over_eager=interval_of(value, "speedup_over_eager"),
            predicted_speedup=number_of(value, "predicted_speedup"),
            measured_peaks=numbers_of(object_of(value, "peak_memory_bytes"), "measured"),
            parity=_parity(value),
            unplaced=str(value.get("unplaced") or ""),
            unplaced_us=steps_of(measured.get("eager"), "measured_step_us")[1] if value.get("unplaced") else (),
            further=tuple(_further(value)),
        )

    @classmethod
    def of_sharding(cls, value: Mapping[str, Any]) -> "RunSummary":
        """From the report.json of a sharded run: what is not of one strategy. Raises FileError."""
        return cls(**_common(value))

    @classmethod
    def of_comparison(cls, value: Mapping[str, Any]) -> "RunSummary":
        """From compare.json: the plan beside it is that of the recommended method."""
        chosen = next((row for row in method_rows(value) if row.name == value.get("recommended")), None)
        common = {**_common(value), "recommendation": str(value.get("recommendation") or "")}
        error = number_of(value, "interval_error")
        common |= {} if error is None else {"interval_error": error}
        if chosen is None:
            return cls(**common)
        gain = None if chosen.name == SINGLE else chosen.gain
        steps: dict[str, Any] = {"median_us": chosen.median_us, "samples_us": chosen.samples_us}
        return cls(**common, **steps, over_single=gain, measured_peaks=chosen.peaks)


@dataclass(frozen=True)
class Compared:
    """A comparison of methods: the rows of its table, which of them is recommended, and a sentence on that."""

    rows: tuple[MethodRow, ...] = ()
    recommended: str = ""
    summary: RunSummary = RunSummary()

    @classmethod
    def load(cls, folder: str | Path) -> "Compared":
        """Reads the comparison in a run's folder; empty where there is none. Raises FileError."""
        path = Path(folder) / COMPARISON
        if not path.is_file():
            return cls()
        value = read_json(path, "comparison")
        try:
            return cls(tuple(method_rows(value)), str(value.get("recommended") or ""), RunSummary.of_comparison(value))
        except FileError as e:
            raise FileError(f"{path}: {e}; write it again with baechi compare --out") from e


def summary_of(run: RunFolder, compared: Compared) -> RunSummary:
    """The results in the run's report, else those in its comparison. Raises FileError."""
    if run.report is None:
        return compared.summary
    try:
        return RunSummary.of_report(run.report)
    except FileError as e:
        raise FileError(f"{run.path / 'report.json'}: {e}; write it again with baechi train --out") from e


def method_rows(comparison: Mapping[str, Any]) -> list[MethodRow]:
    """The methods of a compare.json, after the unplaced step where that was measured. Raises FileError."""
    rows = []
    if comparison.get("unplaced"):
        unplaced = object_of(comparison, "unplaced")
        rows.append(_row({**unplaced, "method": unplaced.get("name")}))
    for row in list_of(comparison, "methods"):
        if not isinstance(row, dict):
            raise FileError(f"a method of the comparison is {row!r}; expected an object")
        rows.append(_row(row))
    return rows


def _row(value: Mapping[str, Any]) -> MethodRow:
    median, samples = steps_of(value.get("measured_step_us"), "measured_step_us")
    return MethodRow(
        name=str(value.get("method") or ""),
        predicted_us=number_of(value, "predicted_step_us"),
        median_us=median,
        samples_us=samples,
        gain=interval_of(value, "ratio"),
        peaks=numbers_of(object_of(value, "peak_memory_bytes"), "measured"),
        note=str(value.get("note") or ""),
    )


def _common(value: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": str(value.get("model") or ""),
        "executor": str(value.get("executor") or ""),
        "made_by": MadeBy.from_json(value, FileError),
        "load_of_others": number_of(value, "load_of_others"),
        "doubts": tuple(map(str, list_of(value, "doubts"))),
        "notes": tuple(map(str, list_of(value, "notes"))),
    }


def _parity(value: Mapping[str, Any]) -> str:
    found = object_of(value, "parity")
    return f"{'passed' if found.get('passed') else 'failed'}; {parity_text(found)}" if found else ""


def _further(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and folders of a script's further placed steps: PyTorch's modules, or TensorFlow's steps. A training's `steps` are a number."""
    steps = value.get("steps")
    for step in (*list_of(value, "modules"), *(steps if isinstance(steps, list) else ())):
        if not isinstance(step, dict):
            raise FileError(f"a placed step of the script is {step!r}; expected an object")
        if step.get("folder") not in (None, "."):
            yield str(step.get("module") or step.get("step") or ""), str(step["folder"])
