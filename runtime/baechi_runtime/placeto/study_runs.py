"""The runs of a study as a CSV file, a row for each point of their learning curves; rows of one run are written at once."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from baechi_ext.errors import FileError
from baechi_ext.ir.files import read_text

RUNS = "runs.csv"
"""The file in a study's folder."""
UNTRAINED, LOCAL_SEARCH = "untrained", "local_search"
CONTROLS = {
    UNTRAINED: "the same episodes in the order topo by a policy that learns nothing",
    LOCAL_SEARCH: "a random decision to a random device, kept where that is no worse; as many plans as the episodes have steps",
}
"""Controls that stand beside the orders in a study."""


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """One search on one graph: in an order, or a control. Repeats differ in what they draw."""

    source: str
    graph: str
    order: str
    repeat: int


@dataclass(frozen=True, slots=True)
class Point:
    """The state of a run after this many episodes; after none: where it begins, all on the fastest device."""

    episodes: int
    best_us: float
    """The least step until then."""
    mean_us: float
    """Mean step at the end of the last episodes."""
    simulated: int
    """Plans simulated until then."""
    seconds: float
    """Processor time."""


NAMES = (*(field.name for field in fields(Run)), *(field.name for field in fields(Point)))


def append(path: Path, run: Run, points: Iterable[Point]) -> None:
    """Adds a whole run to the file, whose head it writes where there is none. Raises FileError where that is not possible."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    if not path.exists():
        rows.writerow(NAMES)
    rows.writerows([*astuple(run), *(f"{x:.7g}" if isinstance(x, float) else x for x in astuple(point))] for point in points)
    try:
        with path.open("a", encoding="utf-8") as out:
            out.write(text.getvalue())
    except OSError as e:
        raise FileError(f"cannot write {str(path)!r}: {e.strerror}; the study goes on where the file can be written") from e


def read_runs(path: Path, episodes: int) -> dict[Run, Sequence[Point]]:
    """The runs that have come to this many episodes; an empty dict where there is no file. Raises FileError for another file."""
    if not path.exists():
        return {}
    found: dict[Run, list[Point]] = {}
    try:
        for row in csv.DictReader(io.StringIO(read_text(path, "runs"), newline="")):
            run = Run(row["source"], row["graph"], row["order"], int(row["repeat"]))
            steps = float(row["best_us"]), float(row["mean_us"])
            point = Point(int(row["episodes"]), *steps, int(row["simulated"]), float(row["seconds"]))
            if not all(map(math.isfinite, (*steps, point.seconds))):
                raise ValueError("a number that is not finite")
            if point.episodes == 0:
                found[run] = []  # of a run that was cut off while it was written, and made again, the second counts
            found[run].append(point)
    except (KeyError, TypeError, ValueError, csv.Error) as e:
        raise FileError(f"{str(path)!r} is not a file of runs ({e!r}); choose another --out, or delete the line") from e
    return {run: points for run, points in found.items() if points[-1].episodes >= episodes}
