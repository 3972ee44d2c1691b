"""The verdict on a step: what a reader wants to know first, on the command line and at the top of a page."""

from collections.abc import Sequence

from baechi_runtime.measure.samples import ERROR, Ratio, enough_samples
from baechi_runtime.report.report import COMPILED, Comparison, Run, Step, Strategy

Verdict = dict[str, str]
"""Its tone, the words that are seen first, and a sentence."""


def verdict(tone: str, large: str, text: str) -> Verdict:
    return {"tone": tone, "large": large, "text": text}


def line_of(found: Verdict) -> str:
    """A verdict as a line of text."""
    return f"{found['large']}{': ' if found['tone'] == 'doubt' else '. '}{found['text']}" if found["large"] else found["text"]


def interval_text(gain: Ratio, error: float = ERROR, steps: int | None = None) -> str:
    """The interval of a gain, or the range where it is by so few steps that they have no interval."""
    kind = f"{100 * (1 - error):.4g}% interval" if steps is None or steps >= enough_samples(error) else "range"
    return f"{kind} {gain.low:.2f} to {gain.high:.2f}"


def inconclusive(doubts: Sequence[str], advice: str) -> Verdict:
    """The verdict on times that are in doubt."""
    return verdict("doubt", "Inconclusive", f"{'; '.join(doubts)}. {advice}")


def verdict_on(gain: Ratio, other: str, more: str = "", error: float = ERROR) -> Verdict:
    """The verdict on a gain over another step that was measured; `more` is added."""
    large, interval = f"{gain.median:.2f} times as fast as {other}", interval_text(gain, error)
    if gain.low > 1:
        return verdict("good", large, f"Splitting pays ({interval}).{more}")
    clearly = "clearly " if gain.high > 1 else ""
    return verdict("bad", large, f"Splitting does not {clearly}pay here ({interval}).{more}")


def step_verdict(report: Run, *, splits: bool, why_whole: str = "") -> Verdict | None:
    """The verdict on a measured step, whose plan `splits` it or says why not; None where nothing was measured that it gained on."""
    gain, other = decisive(report)
    if not splits:
        return verdict("plain", "Not split", f"The plan runs everything on one device{f': {why_whole}' if why_whole else ''}.")
    if report.doubts:
        alone = isinstance(report, Step) and bool(report.unplaced)
        advice = "baechi compare measures in turn." if alone else "Run it again on a quiet machine, or with more --num_steps."
        return inconclusive(report.doubts, advice)
    return None if gain is None else verdict_on(gain, other, error=report.error)


def sharded_verdict(strategies: Sequence[Strategy], doubts: Sequence[str], bound: str = "", error: float = ERROR) -> Verdict:
    """The verdict on the fastest of steps that are split in several ways; `bound`, what holds the predicted one up, is added."""
    best = fastest(strategies)
    if best is None:
        return verdict("plain", "", f"This step is predicted, and was not measured.{bound}")
    if doubts:
        more = ", or with more --num_steps" if any(s.ratio for s in strategies) else ""  # a training has none, and knows no gain
        return inconclusive(doubts, f"Run it again on a quiet machine{more}.{bound}")
    if best.ratio is None:
        return verdict("plain", "", f"{best.name} has the shortest step; how it compares with the step not split is not known.{bound}")
    return verdict_on(best.ratio, f"the step not split, with {best.name}", bound, error)


def fastest(strategies: Sequence[Strategy]) -> Strategy | None:
    """The strategy with the least median step; None where none was measured."""
    measured = [(s.measured_step_us.median, s) for s in strategies if s.measured_step_us is not None]
    return min(measured, key=lambda pair: pair[0], default=(0.0, None))[1]


def unplaced_step(report: Run) -> str:
    """The unplaced step's name in a sentence: that of a script's, "plain eager", or "plain tf.function"."""
    if isinstance(report, Step) and report.unplaced:
        return report.unplaced
    name = report.eager_step if isinstance(report, Step) else isinstance(report, Comparison) and report.unplaced and report.unplaced.name
    return f"plain {short_name(name or 'eager')}"


def short_name(step: str) -> str:
    """The name of an unplaced step without how it was run: "eager" of "eager, one device"."""
    return step.partition(",")[0]


def compared(report: Run) -> tuple[Ratio | None, str]:
    """The gain and what it is over: the step as it is without us, the faster one of those that were measured, else our program on one
    device."""
    steps = report.measured_step_us if isinstance(report, Step) else {}
    compiled, placed, eager = (steps.get(name) for name in (COMPILED, "placed", "eager"))
    if compiled and placed and (eager is None or compiled.median < eager.median):
        return Ratio.of(compiled, placed, report.error), COMPILED
    if report.over_unplaced is not None:
        return report.over_unplaced, unplaced_step(report)
    return report.over_single, "one device"


def decisive(report: Run) -> tuple[Ratio | None, str]:
    """The gain that the verdict is on, and what it is over: as `compared`; but our program on one device where that alone is not beaten, as
    what gains there is no split."""
    gain, other = compared(report)
    if gain is not None and report.over_single is not None and report.over_single.low <= 1 < gain.low:
        return report.over_single, "our program on one device"
    return gain, other
