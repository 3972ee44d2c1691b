"""The pages of the Python API: of the names that `baechi_ext` hands out, and of nothing else.

python -W error -m tests.docs.api_pages build/api
"""

import sys
from pathlib import Path

import pdoc
import pdoc.render

import baechi_ext


def write(folder: Path) -> Path:
    """Writes the pages, and returns the one of the names."""
    for name in baechi_ext.__all__:  # pdoc sees what a module holds, not what it hands out when asked
        setattr(baechi_ext, name, getattr(baechi_ext, name))
    pdoc.render.configure(show_source=False)
    pdoc.pdoc("baechi_ext", r"!baechi_ext\..*", output_directory=folder)
    return folder / "baechi_ext.html"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
