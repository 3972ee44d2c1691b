"""The families by name, and their files: FOLDER/FAMILY/index.json, which names the graph files beside it and their split."""

from pathlib import Path
from typing import Any

from baechi_ext.errors import FileError, OptionError
from baechi_ext.ir import OpGraph
from baechi_ext.ir.files import read_json
from baechi_ext.ir.numbers import as_number

FAMILIES: dict[str, str] = {
    "cifar10": "convolutional networks drawn from the search spaces of ENAS",
    "ptb": "recurrent language models drawn from the search space of ENAS, unrolled",
    "nmt": "recurrent encoders and decoders with attention, of several lengths and batches",
}
"""Name -> what its graphs are; those of Placeto (Addanki et al., NeurIPS 2019), made anew since its files cannot be had."""
SPLITS = ("train", "test")
INSTALLED = Path(__file__).parent / "graphs"
"""The graphs that come with the package."""
INDEX = "index.json"
SIZES = ("captured_ops", "nodes", "edges", "compute_us", "longest_path_us")
"""Numbers that an index has for each graph."""


def load(family: str, split: str | None = None, folder: str | Path = INSTALLED) -> list[OpGraph]:
    """The graphs of a family, or of one of its splits, in the order of their index.

    Raises OptionError for an unknown family or split, FileError where a file is missing or wrong, GraphError for a wrong graph.
    """
    if split is not None and split not in SPLITS:
        raise OptionError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}, or None for all graphs")
    entries = read_index(family, folder)["graphs"]
    return [OpGraph.load(Path(folder) / family / entry["file"]) for entry in entries if split in (None, entry["split"])]


def read_index(family: str, folder: str | Path = INSTALLED) -> dict[str, Any]:
    """The index of a family's graphs: how they were made, and of each its file, split, architecture and sizes.

    Raises OptionError for an unknown family, FileError where the index is missing or wrong.
    """
    if family not in FAMILIES:
        raise OptionError(f"unknown family {family!r}; choose one of {', '.join(FAMILIES)}")
    path = Path(folder) / family / INDEX
    if not path.exists():
        raise FileError(f"there is no {str(path)!r}; make it with `baechi datasets make {family} --out={folder}`")
    index = read_json(path, "index")
    entries = index.get("graphs")
    if not isinstance(entries, list):
        raise FileError(f'index file {str(path)!r} has no list "graphs"; make the family again')
    for position, entry in enumerate(entries):
        file, split = (entry.get("file"), entry.get("split")) if isinstance(entry, dict) else (None, None)
        if not isinstance(file, str) or Path(file).name != file or split not in SPLITS:
            raise FileError(
                f"index file {str(path)!r}: graph {position} is {entry!r}; expected a file name and a split ({' or '.join(SPLITS)})"
            )
        for size in SIZES:
            as_number(entry.get(size), f"index file {str(path)!r}: {size} of {file}", FileError)
    return {**index, "family": family}
