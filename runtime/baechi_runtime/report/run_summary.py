"""Results of a run that are not in its plan, from report.json, or from compare.json where there is none: read once, and checked."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baechi_ext.errors import FileError
from baechi_ext.ir.files import read_json
from baechi_ext.ir.made_by import MadeBy
from baechi_runtime.files.run_folder import COMPARISON, REPORT, RunFolder
from baechi_runtime.measure.samples import Ratio, Samples
from baechi_runtime.report.fields import list_of, number_of, numbers_of, object_of, ratio_of, samples_of, text_of
from baechi_runtime.report.report import parity_text

SINGLE = "single"
"""The name, in a comparison, of the step on one device."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to run the step that others are compared with: a method of a comparison, or a strategy of a sharded run."""

    name: str
    note: str
    predicted_us: float | None
    measured: Samples | None
    gain: Ratio | None
    """Over one device, or over the step that is not split."""

    def to_json(self) -> dict[str, Any]:
        """The variant as pages show it."""
        measured, gain = self.measured, self.gain
        return {
            "name": self.name,
            "note": self.note,
            "predicted_us": self.predicted_us,
            "median_us": None if measured is None else measured.median,
            "samples_us": [] if measured is None else list(measured.us),
            "gain": None if gain is None else gain.to_json(),
        }


def variant_fields(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of a Variant from a report, which has its name under the key `name`. Raises FileError."""
    return {
        "name": text_of(value, name),
        "note": text_of(value, "note"),
        "predicted_us": number_of(value, "predicted_step_us"),
        "measured": samples_of(value, "measured_step_us"),
        "gain": ratio_of(value, "ratio"),
    }


@dataclass(frozen=True, kw_only=True)
class MethodRow(Variant):
    """A method of a comparison."""

    peaks: tuple[float, ...]
    """Measured peak bytes by device."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run's results; what is not known is None or empty. Times are microseconds, ratios those of the placed step."""

    model: str = ""
    executor: str = ""
    made_by: MadeBy = MadeBy(versions={})
    measured: Samples | None = None
    over_single: Ratio | None = None
    over_eager: Ratio | None = None
    unplaced: str = ""
    """The name of a script's unplaced step, which its placed one is compared with; empty for other runs."""
    unplaced_steps: Samples | None = None
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
        steps, parity = object_of(value, "measured_step_us"), object_of(value, "parity")
        return cls(
            **common_fields(value),
            measured=samples_of(steps, "placed") if "placed" in steps else samples_of(value, "measured_step_us"),
            over_single=ratio_of(value, "speedup_interval"),
            over_eager=ratio_of(value, "speedup_over_eager"),
            predicted_speedup=number_of(value, "predicted_speedup"),
            measured_peaks=numbers_of(object_of(value, "peak_memory_bytes"), "measured"),
            parity=f"{'passed' if parity.get('passed') else 'failed'}; {parity_text(parity)}" if parity else "",
            unplaced=text_of(value, "unplaced"),
            unplaced_steps=samples_of(steps, "eager") if value.get("unplaced") else None,
            further=tuple(_further(value)),
        )

    @classmethod
    def of_comparison(cls, value: Mapping[str, Any]) -> "RunSummary":
        """From compare.json: the plan beside it is that of the recommended method, or where that has none, of `planned`."""
        common = common_fields(value) | {"recommendation": text_of(value, "recommendation")}
        if (error := number_of(value, "interval_error")) is not None:
            common["interval_error"] = error
        planned = value.get("planned", value.get("recommended"))
        chosen = next((row for row in method_rows(value) if row.name == planned), None)
        if chosen is None:
            return cls(**common)
        gain = None if chosen.name == SINGLE else chosen.gain
        return cls(**common, measured=chosen.measured, over_single=gain, measured_peaks=chosen.peaks)


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
            return cls(tuple(method_rows(value)), text_of(value, "recommended"), RunSummary.of_comparison(value))
        except FileError as e:
            raise FileError(f"{path}: {e}; write it again with baechi compare --out") from e


def summary_of(run: RunFolder, compared: Compared) -> RunSummary:
    """The results in the run's report, else those in its comparison. Raises FileError."""
    if run.report is None:
        return compared.summary
    try:
        return RunSummary.of_report(run.report)
    except FileError as e:
        raise FileError(f"{run.path / REPORT}: {e}; write it again with baechi train --out") from e


def method_rows(comparison: Mapping[str, Any]) -> list[MethodRow]:
    """The methods of a compare.json, after the unplaced step where that was measured. Raises FileError."""
    unplaced = object_of(comparison, "unplaced")
    rows = [_row(unplaced, "name")] if unplaced else []
    for row in list_of(comparison, "methods"):
        if not isinstance(row, dict):
            raise FileError(f"a method of the comparison is {row!r}; expected an object")
        rows.append(_row(row, "method"))
    return rows


def _row(value: Mapping[str, Any], name: str) -> MethodRow:
    return MethodRow(**variant_fields(value, name), peaks=numbers_of(object_of(value, "peak_memory_bytes"), "measured"))


def common_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a RunSummary that every report has, a sharded run's, too. Raises FileError."""
    return {
        "model": text_of(value, "model"),
        "executor": text_of(value, "executor"),
        "made_by": MadeBy.from_json(value, FileError),
        "load_of_others": number_of(value, "load_of_others"),
        "doubts": tuple(map(str, list_of(value, "doubts"))),
        "notes": tuple(map(str, list_of(value, "notes"))),
    }


def _further(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and folders of a script's further placed steps: PyTorch's modules, or TensorFlow's steps. A training's `steps` are a number."""
    steps = value.get("steps")
    for step in (*list_of(value, "modules"), *(steps if isinstance(steps, list) else ())):
        if not isinstance(step, dict):
            raise FileError(f"a placed step of the script is {step!r}; expected an object")
        if step.get("folder") not in (None, "."):
            yield text_of(step, "module") or text_of(step, "step"), str(step["folder"])
