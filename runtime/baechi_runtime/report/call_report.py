"""The gain from placing the calls of a user's own module or training step: predicted, and measured in the user's own loop."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from baechi_ext.ir.measured import MeasuredStep
from baechi_ext.ir.plan import Plan
from baechi_runtime.measure.samples import Measurement, Noise, Ratio, Samples
from baechi_runtime.report.findings import PlanFindings
from baechi_runtime.report.report import Call, PerDevice, Sides, Verified
from baechi_runtime.report.step_report import StepReport
from baechi_runtime.report.tables import as_size, as_time

INTERRUPTED = "the search for its plan was interrupted"
"""The reason why a step that has a plan is not placed."""
OTHER_SHAPES = "arguments of another shape"
PLAIN_TURN = "it was the plain one's turn"
UNTRACED = "TorchDynamo found no graph in it that trains, or had traced it too often and runs it as it is"
"""The reasons why a call ran as it is between placed ones."""
FORWARD_ALONE = "a forward pass alone is not placed"
"""The end of the reasons of what could not have trained."""


@dataclass(frozen=True, kw_only=True, repr=False)
class CallReport(PlanFindings):
    """The first placed call of a module, or of a training step; `refusal` says why calls run as they are, where they do."""

    kind: Literal["module", "step"]
    name: str
    method: str
    samples: Mapping[str, Samples]
    """`placed` and `eager`, the unplaced ones, as far as they were timed: steps in which the call ran so, unplaced ones with the user's own
    threads, or `on_one_core`."""
    noise: Noise
    """The disturbances of the devices since the call was first seen."""
    verified: Verified
    placed_steps: int
    shapes: int
    """Variants that are placed: shapes of the arguments, and states of what the module's code reads."""
    unplaced_calls: Mapping[str, int]
    """Reason why calls ran as they are -> number of calls."""
    refusal: str
    fragments: int
    """Pieces that graph breaks cut the call into, which are planned together."""
    parts: tuple[int, ...] = ()
    """The examples of each part that the batch goes in; none: it goes as a whole."""
    per_block: int = 0
    """Steps of either kind in each block of `samples`; 0: placed and unplaced steps did not take turns."""
    on_one_core: bool = False
    """True where unplaced steps have one core and one thread, as those of each worker process do."""
    setup_seconds: float | None = None
    """Time for tracing, profiling and planning; None where it is not taken."""
    graph_breaks: tuple[str, ...] = ()
    recompiles: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan | None:
        return None if self.result is None else self.result.plan

    @property
    def unplaced_steps(self) -> int:
        return sum(self.unplaced_calls.values())

    @property
    def doubts(self) -> list[str]:
        """Why nothing can be concluded from the times, one reason each; empty where nothing is: placed or unplaced steps were not timed."""
        return self.measurement().doubts() if len(self.samples) == 2 else []

    def measurement(self, busy_us: tuple[float, ...] = ()) -> Measurement:
        """The calls as what a report of their step is made from; `busy_us` are medians, one per device, where they are known."""
        return Measurement(**vars(self.noise), samples=self.samples, busy_us={"placed": busy_us}, per_block=self.per_block)

    def step(self, measured: MeasuredStep | None, **known: Any) -> StepReport:
        """The report of its step, which has a plan; memory is that which was `measured`, where it was. `known`: its other fields."""
        memory = () if measured is None or measured.memory is None else measured.memory
        peaks = tuple(int(max((held.bytes for held in device), default=0)) for device in memory)
        given: dict[str, Any] = {"result": self.result, "single": self.single, "measurement": self.measurement(), "notes": self.notes}
        return StepReport(**{**given, **known}, peak_bytes=peaks)

    def paid_back(self) -> str:
        """Say how long set-up took, what placing saves per step, and when that has paid back."""
        if self.setup_seconds is None:
            return ""
        took = f"set-up took {self.setup_seconds:.1f} s"
        gain = self.measurement().over_unplaced
        if gain is None or self.doubts:
            return took
        if gain.low <= 1:
            return f"{took}; placing {'saves nothing' if gain.high < 1 else 'does not clearly save time'}"
        saved_us = self.samples["placed"].median * (gain.median - 1)
        steps = int(self.setup_seconds * 1e6 / saved_us) + 1
        return f"{took}, placing saves {as_time(saved_us)} a step: paid back at step {steps}"

    def report(self) -> Call:
        peaks = () if self.result is None else self.result.timeline.peak_memory_bytes
        return Call(
            **{**self.planned(), "method": self.method, self.kind: self.name},
            devices=list(self.devices),
            num_ops=list(self.num_ops),
            fragments=self.fragments,
            microbatches=list(self.parts),
            predicted_step_us=Sides(single=self.predicted_single_us, placed=self.predicted_us),
            measured_step_us=self.measurement().reported(),
            load_of_others=self.noise.load_of_others,
            doubts=self.doubts,
            peak_memory_bytes=PerDevice(predicted=list(peaks)),
            verification=self.verified,
            placed_steps=self.placed_steps,
            unplaced_steps=self.unplaced_steps,
            unplaced_calls=dict(self.unplaced_calls),
            shapes=self.shapes,
            setup_seconds=self.setup_seconds,
            refusal=self.refusal,
            graph_breaks=list(self.graph_breaks),
            recompiles=list(self.recompiles),
        )

    def line(self) -> str:
        """One line: what was gained and what was placed, or why not."""
        return f"{self.name}: {'; '.join(filter(None, self._said()))}"

    def _said(self) -> Iterator[str]:
        if self.result is None or (self.refusal and not self.placed_steps):
            most = max(self.unplaced_calls, key=self._weight, default="")
            yield f"not placed; {self.refusal or self._unplaced(most) or 'no training call of it ran to its end'}"
            yield self._predicted()
        elif self.refusal:
            yield f"placed for {self.placed_steps} steps, then as it is; {self.refusal}; {self.verified}"
        else:
            yield f"inconclusive: {'; '.join(self.doubts)}" if self.doubts else ""
            yield self._measured()
            ops = " + ".join(map(str, self.num_ops))
            yield f"{self.method}, {ops} ops on {', '.join(self.devices)}; {self.placed_steps} steps placed, {self.verified}"
            yield f"the batch in {len(self.parts)} parts ({', '.join(map(str, self.parts))} examples)" if self.parts else ""
            if left_out := self.unplaced_calls.get(OTHER_SHAPES):
                yield f"{left_out} steps of other shapes ran unplaced"
            yield self._unplaced(UNTRACED)
            yield self._predicted()
            yield "" if self.result.splits or len(self.devices) == 1 else self.result.why_whole
        if self.result is not None:
            yield self.paid_back()
        if self.graph_breaks:
            yield f"{len(self.graph_breaks)} graph break{'s' * (len(self.graph_breaks) > 1)}, the first: {self.graph_breaks[0]}"

    def _weight(self, why: str) -> tuple[bool, bool, int]:
        """The weight of a reason, the most telling greatest: beside fragments that trained, many that had nothing to train say little."""
        return why == UNTRACED, not why.endswith(FORWARD_ALONE), self.unplaced_calls[why]

    def _unplaced(self, why: str) -> str:
        count, last = self.unplaced_calls.get(why, 0), f" (last for {self.recompiles[-1]})" if self.recompiles else ""
        return f"{count} calls ran as they are: {why}{last}" if count else ""

    def _predicted(self) -> str:
        if self.predicted_us is None or self.predicted_single_us is None:
            return ""
        return f"predicted {as_time(self.predicted_single_us)} on one device, {as_time(self.predicted_us)} placed"

    def _measured(self) -> str:
        if "placed" not in self.samples:
            return ""
        placed, unplaced = self.samples["placed"], self.samples.get("eager")
        if unplaced is None:
            return f"steps of {as_time(placed.median)} placed"
        gain = Ratio.of_script(unplaced, placed, self.per_block)
        said = f"{gain.median:.2f} times as fast: steps of {as_time(placed.median)} placed, {as_time(unplaced.median)} as it is"
        return said + " on one core" * self.on_one_core

    def lines(self) -> Iterator[str]:
        yield self.line()
        if self.result is not None:
            timeline = self.result.timeline
            for device, ops, peak in zip(self.devices, self.num_ops, timeline.peak_memory_bytes, strict=True):
                yield f"  {device}: {ops} ops, {as_size(peak)} at most (predicted)"
            yield f"  moved: {len(timeline.transfers)} tensors, {as_size(timeline.bytes_moved)} a step"
        yield from (f"  note: {note}" for note in self.notes)
