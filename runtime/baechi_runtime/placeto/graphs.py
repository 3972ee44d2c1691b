"""Where learned placers get their graphs: a family of data sets, or a folder of graph files."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from baechi_ext.datasets import FAMILIES, read_index
from baechi_ext.datasets.families import INDEX
from baechi_ext.errors import FileError, OptionError
from baechi_ext.ir import OpGraph
from baechi_ext.ir.files import encode_text


def require_titles(sources: Iterable["Source"]) -> None:
    """Raises OptionError where two have one title: they would write the same files, or be the same graphs."""
    named: dict[str, Source] = {}
    for source in sources:
        other = named.setdefault(source.title, source)
        if other is not source:
            raise OptionError(
                f"the sources {other.name!r} and {source.name!r} are both called {source.title!r}; give each once, "
                "and rename one of two folders of one name"
            )


@dataclass(frozen=True, slots=True)
class Source:
    """A family in `folder`, or where `name` is of none, a folder of graph files; of either at most `most` graphs."""

    name: str
    folder: Path
    most: int | None = None

    @property
    def title(self) -> str:
        """A name for files."""
        return self.name if self.name in FAMILIES else Path(self.name).resolve().name

    def graphs(self, split: str) -> dict[str, OpGraph]:
        """File name, in UTF-8 -> graph: of a family those of a split, of a folder all.

        Raises OptionError where there is neither, FileError where a file is missing or wrong or there are no graphs, GraphError.
        """
        if self.name in FAMILIES:
            folder = self.folder / self.name
            names = [entry["file"] for entry in read_index(self.name, self.folder)["graphs"] if entry["split"] == split]
        else:
            folder = Path(self.name)
            if not folder.is_dir():
                raise OptionError(f"{self.name!r} is neither a family ({', '.join(FAMILIES)}) nor a folder; give one of them")
            names = sorted(path.name for path in folder.glob("*.json*") if path.name != INDEX)
        if not names:
            raise FileError(f"{str(folder)!r} has no graph files; expected some *.json")
        return {encode_text(name).decode(): OpGraph.load(folder / name) for name in names[: self.most]}
