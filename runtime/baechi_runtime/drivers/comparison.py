"""A comparison: the methods that take part, each with its plan or why it has none; and the findings: which methods are faster than one
device, which of them are no worse than the best, and what to do.

Ratios are of paired samples with intervals by the sign test, so wide that all of them, of every pair of variants, hold together in 95 of
100 comparisons (Bonferroni): the best is picked from the same samples, and a pair that seems to differ by chance alone would be found among
many.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline
from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.ranking import Engine
from baechi_runtime.drivers.train_request import TrainRequest, refuse
from baechi_runtime.files.run_folder import method_plan
from baechi_runtime.measure.parity_result import Parity
from baechi_runtime.measure.samples import ERROR, NOISY_SPREAD, Measurement, Ratio, Samples, enough_samples
from baechi_runtime.report.findings import Findings, load_text
from baechi_runtime.report.report import COMPILED, SINGLE, Method, ParityCheck, PerDevice, Variant
from baechi_runtime.report.report import Comparison as ComparisonReport
from baechi_runtime.report.tables import as_range, as_time, show, table_of

if TYPE_CHECKING:
    from rich.table import Table

AUTO = "auto"
"""The method that looks among all ways."""
_WIDTH = 170
UNPLACED = "eager"
"""The name that `measure` gives the unplaced step."""


@dataclass(frozen=True)
class CompareRequest:
    """A comparison to make: everything but the method is as `train` has it."""

    train: TrainRequest
    plans: Mapping[str, pipeline.PlanRequest]
    """The requests by method, in the order of the table."""
    script: str | None = None
    """The script whose first training call is compared; None: a built-in model's step."""
    script_arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises OptionError where a script can't be compared in that way."""
        if self.script is None:
            return
        refuse(self.train.compile, "--compile is for built-in models; drop it")
        refuse(
            self.train.cuda and self.train.framework == "torch",
            "baechi compare runs a script's call on CPU workers: with several plans, a parameter would be on several GPUs; drop the GPUs, "
            "or run baechi train SCRIPT once a method",
        )


@dataclass
class Contender:
    """One method: a plan of the step, of the step over parts of its batch, or an engine of the framework's own."""

    method: str
    result: PlanResult | None = None
    step: Any = None
    """The captured step that it runs."""
    engine: Engine | None = None
    loaded: Any = None
    """Its step, ready to run, where that is neither of a plan nor of an engine."""
    flag: str = ""
    """The flag by which `train` runs it, where that is not the method's name."""
    parity: Parity | None = None
    peak_bytes: tuple[int, ...] = ()
    notes: list[str] = field(default_factory=list)
    refusal: str = ""
    """Why it is not measured."""

    @property
    def splits(self) -> bool:
        """True if it uses several devices."""
        return self.engine is not None or (self.result is not None and self.result.splits)

    def program(self, single: Timeline) -> tuple[Timeline, bool]:
        """The program that is run for it; true with it if that is `single`, the step on one device with the others idle."""
        if self.method == SINGLE or self.result is None:
            return single, True
        return self.result.timeline, False


@dataclass(frozen=True)
class Comparison(Findings):
    """Contenders, `single` among them, and the steps of those that could be measured."""

    model: str
    executor: str
    contenders: tuple[Contender, ...]
    measurement: Measurement
    single: Timeline
    """The prediction for one device that works alone."""
    peaks_measured_by: str
    notes: tuple[str, ...]
    unplaced: str = "eager, one device"

    @cached_property
    def measured(self) -> tuple[str, ...]:
        """The methods that were measured, in the order of the table."""
        return tuple(c.method for c in self.contenders if c.method in self.measurement.samples)

    def samples(self, method: str) -> Samples:
        return self.measurement.samples[method]

    def median(self, method: str) -> float:
        return self.samples(method).median

    @cached_property
    def error(self) -> float:
        """The share of cases in which the interval of one pair may be wrong; pairs with the unplaced step count, too."""
        count = len(self.measured) + (UNPLACED in self.measurement.samples)
        return ERROR / max(count * (count - 1) // 2, 1)

    def ratio(self, slow: str, fast: str) -> Ratio:
        """Speed-up of `fast` over `slow`, with an interval that holds together with those of all other pairs."""
        return Ratio.of(self.samples(slow), self.samples(fast), self.error)

    def gain(self, method: str) -> Ratio | None:
        """Speed-up of a method, or of the unplaced step, over one device; None where either was not measured."""
        return self.ratio(SINGLE, method) if SINGLE in self.measured and method in self.measurement.samples else None

    @property
    def enough(self) -> bool:
        """True if there are enough steps to tell anything."""
        return bool(self.measured) and len(self.samples(self.measured[0]).us) >= enough_samples(self.error)

    def differ(self, a: str, b: str) -> bool:
        """True if the steps of two methods can be told apart."""
        return self.beats(a, b) or self.beats(b, a)

    def beats(self, a: str, b: str) -> bool:
        """True if method a can be told to be faster than b, by their pairs: the order of medians may be another one."""
        return self.enough and a != b and self.ratio(b, a).low > 1

    @cached_property
    def best(self) -> str | None:
        """The method with the least median step."""
        return min(self.measured, key=self.median, default=None)

    @cached_property
    def recommended(self) -> str | None:
        """The method to use: one that is faster than one device, by its interval, and than the unplaced step; else one device, where it
        holds the step."""
        if SINGLE not in self.measured:
            return min(self._splits, key=self.median, default=None)
        faster = [m for m in self._splits if all(self.beats(m, rival) for rival in (SINGLE, *self._unsplit))]
        return min(faster, key=self.median, default=SINGLE)

    @cached_property
    def _unsplit(self) -> list[str]:
        """The steps that need no plan, as far as they were measured."""
        return [name for name in (UNPLACED, COMPILED) if name in self.measurement.samples]

    @cached_property
    def _splits(self) -> list[str]:
        """The measured methods whose plans have several devices."""
        return [c.method for c in self.contenders if c.method in self.measured and c.method != SINGLE and c.splits]

    @cached_property
    def planned(self) -> str | None:
        """The method whose plan stands for the comparison: the recommended one, or the fastest that has a plan."""
        having = [m for m in self.measured if self.contender(m).result is not None]
        return self.recommended if self.recommended in having else min(having, key=self.median, default=None)

    def contender(self, method: str) -> Contender:
        return next(c for c in self.contenders if c.method == method)

    def predicted_us(self, contender: Contender) -> float | None:
        if contender.method == SINGLE:
            return self.single.makespan_us
        if contender.engine is not None:
            return contender.engine.predicted_us
        return None if contender.result is None else contender.result.predicted_step_us

    def report(self) -> ComparisonReport:
        """The content of compare.json."""
        unplaced = self.measurement.samples.get(UNPLACED)
        return ComparisonReport(
            model=self.model,
            executor=self.executor,
            methods=[self._row(contender) for contender in self.contenders],
            unplaced=None if unplaced is None else Variant(name=self.unplaced, measured_step_us=unplaced, ratio=self.gain(UNPLACED)),
            interval_error=self.error,
            load_of_others=self.measurement.load_of_others,
            doubts=self.doubts(),
            notes=list(self.notes),
            recommended=self.recommended,
            planned=self.planned,
            recommendation=self.recommendation(),
        )

    def print(self) -> None:
        """Prints the recommendation, the table, and what is to be said of it on stdout."""
        recommendation, *remarks = self.lines()
        show(recommendation, "", self.table(), "", *remarks, width=_WIDTH)

    def table(self) -> "Table":
        """The methods, after the unplaced step where that was measured: predicted, measured, and what can be told of the differences."""
        rows = [self._cells(contender) for contender in self.contenders]
        if UNPLACED in self.measurement.samples:
            rows.insert(0, (self.unplaced, "-", *self._seen(UNPLACED), "unplaced"))
        names = ("method", "predicted", "measured", "min to max", "speed-up", "interval", "one device", "best", "note")
        return table_of(names, rows, words=["note"])

    def _cells(self, contender: Contender) -> tuple[str, ...]:
        method, predicted = contender.method, self.predicted_us(contender)
        before = (method, "-" if predicted is None else as_time(predicted))
        if method not in self.measured:
            return *before, "-", "-", "-", "-", "-", "-", f"not measured: {contender.refusal}"
        return *before, *self._seen(method), self.note(contender)

    def _seen(self, name: str) -> tuple[str, ...]:
        """The cells of what was measured."""
        samples, gain, best = self.samples(name), self.gain(name), self.best or name
        return (
            as_time(samples.median),
            as_range(samples.us),
            "-" if gain is None else f"{gain.median:.2f}",
            "-" if gain is None or name == SINGLE else f"{gain.low:.2f} to {gain.high:.2f}",
            "-" if gain is None or name == SINGLE else self.beside(name, SINGLE),
            "the best" if name == best else self.beside(name, best),
        )

    def beside(self, method: str, other: str) -> str:
        """Says "faster", "slower" or "can't tell" of a method's step beside another's."""
        if self.beats(method, other):
            return "faster"
        return "slower" if self.beats(other, method) else "can't tell"

    def lines(self) -> Iterator[str]:
        """The recommendation; and remarks on the table: how certain it is, under what load, notes."""
        yield self.recommendation()
        yield (
            f"intervals hold together, of all pairs, in 95 of 100 comparisons; each in {1 - self.error:.2%}"
            if self.enough
            else "so few steps give ranges, no intervals that hold together"
        )
        yield load_text(self.measurement.load_of_others)
        yield from (f"note: {note}" for note in self.notes)

    def _row(self, contender: Contender) -> Method:
        method, result, gain = contender.method, contender.result, self.gain(contender.method)
        there, planned = method in self.measured, dict[str, Any]()
        if result is not None:
            planned = {"plan": method_plan(method), "splits": result.splits, "lower_bound_us": result.lower_bound_us}
            planned |= {"placement_seconds": result.placement_seconds}
            planned |= {"transfers": len(result.timeline.transfers), "bytes_moved": result.timeline.bytes_moved}
        return Method(
            name=method,
            predicted_step_us=self.predicted_us(contender),
            measured_step_us=self.samples(method) if there else None,
            ratio=gain,
            differs_from_one_device=self.differ(SINGLE, method) if gain is not None else None,
            differs_from_best=self.differ(method, self.best) if there and self.best is not None else None,
            **planned,
            peak_memory_bytes=PerDevice(measured=list(contender.peak_bytes), measured_by=self.peaks_measured_by),
            parity=None if contender.parity is None else ParityCheck.of(contender.parity),
            note=self.note(contender),
            flag=contender.flag,
        )

    def note(self, contender: Contender) -> str:
        """Why a method was not measured, or what else is to be said of its plan."""
        if contender.refusal:
            return contender.refusal
        return "; ".join([*self._likenesses(contender), *contender.notes])

    def _likenesses(self, contender: Contender) -> Iterator[str]:
        result = contender.result
        if result is None or contender.method == SINGLE:
            return
        if not result.splits:
            yield "does not split"
            return
        for other in self.contenders:
            if other is contender:
                return
            if other.result is not None and other.result.plan.placement == result.plan.placement:
                yield f"places every op where {other.method} does"
                return

    def doubts(self) -> list[str]:
        """Why the comparison tells less than it might, one reason each."""
        found = self.measurement.disturbances()
        if self.measured and not self.enough:
            taken = len(self.samples(self.measured[0]).us)
            found.append(f"{taken} steps of each tell nothing for sure, {enough_samples(self.error)} may")
        return found

    def recommendation(self) -> str:
        """One sentence that follows from the intervals."""
        doubts, advice = self.doubts(), self._advice()
        if self.best == COMPILED and COMPILED not in advice and self.recommended == SINGLE and self.beats(COMPILED, SINGLE):
            advice += f"; under {COMPILED}, one device is {self.gain(COMPILED)} times as fast as our program there"
        joint = "; besides, " if ", but " in advice else ", but "
        return advice + (joint + "; ".join(doubts) if doubts else "") + "."

    def _advice(self) -> str:
        chosen, splits = self.recommended, self._splits
        if chosen is None:
            return "Nothing to choose from: no method's step could be measured"
        if SINGLE not in self.measured:
            said = f"Split, with {self._called(chosen)}{self._alike(chosen)}: one device cannot run the step ({self._why_not_one()})"
            return said + self._faster_without_plan(chosen)
        if not splits:
            return "Don't split: no method gave a plan with more than one device that could be measured"
        if chosen != SINGLE:
            return f"Split, with {self._called(chosen)}{self._alike(chosen)}: its step is {self.gain(chosen)} times as fast as one device's"
        nearest = min(splits, key=self.median)
        gain = self.ratio(SINGLE, nearest)
        if not self.enough:
            return f"Don't split on so few steps: the quickest of the splits, {nearest}, was {gain} times as fast as one device"
        if self.beats(nearest, SINGLE):
            rival = min(self._unsplit, key=self.median)
            called = _called_unsplit(rival)
            unclear = f"not clearly faster than {called}, " if self.beats(nearest, rival) == self.beats(rival, nearest) else ""
            than = f"{unclear}{self.ratio(rival, nearest)} times as fast{'' if unclear else f' as {called}'}"
            return f"Don't split: {nearest} is {gain} times as fast as our program on one device, but {than}"
        if gain.high < 1:
            return f"Don't split: even the best of the splits, {nearest}, is slower, {gain} times as fast as one device"
        if gain.spread > NOISY_SPREAD:
            return f"Don't split until more steps (--num_steps) settle it: {nearest} is {gain} times as fast as one device"
        return f"Don't split: no method is clearly faster than one device; the best, {nearest}, is {gain} times as fast"

    def _faster_without_plan(self, chosen: str) -> str:
        """A faster step without a plan, which nothing limits, where one device's program is refused; empty where there is none."""
        rival = min((name for name in self._unsplit if self.beats(name, chosen)), key=self.median, default=None)
        if rival is None:
            return ""
        return f"; yet {_called_unsplit(rival)}, which no limit of a device binds, is {self.ratio(chosen, rival)} times as fast as that"

    def _called(self, method: str) -> str:
        flag = self.contender(method).flag
        return f"{method}, which is {flag}" if flag else method

    def _alike(self, chosen: str) -> str:
        others = [m for m in self._splits if m != chosen and not self.differ(m, chosen)]
        listed = " and ".join(filter(None, (", ".join(others[:-1]), *others[-1:])))
        return f" ({listed} can't be told from it)" if others else ""

    def _why_not_one(self) -> str:
        return self.contender(SINGLE).refusal or "it was not measured"


def _called_unsplit(name: str) -> str:
    return "the step unplaced" if name == UNPLACED else f"one device under {name}"
