"""The Python API can be made from docstrings (`make docs`): each module has one, and pdoc renders those of the public names."""

import ast
import re
from pathlib import Path

import pytest

import baechi_ext
from tests.docs.api_pages import write
from tests.docs.pages import ROOT
from tests.test_layers import modules


@pytest.mark.parametrize("path", modules("baechi_ext"), ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_classes_say_what_they_are(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    assert [node.name for node in classes if not ast.get_docstring(node)] == []


def test_the_front_door_says_what_it_takes() -> None:
    """Options as keyword arguments are those of the two frameworks, each with its type and a line on it."""
    assert "Raises MissingBackendError" in baechi_ext.parallelize.__doc__
    frameworks = [fields_of(ROOT / "runtime" / "baechi_runtime" / name / "calls" / "parallelize.py") for name in ("torch", "tensorflow")]
    found = fields_of(ROOT / "baechi_ext" / "options.py")
    assert set(found) == {name for fields in frameworks for name in fields}
    for fields in frameworks:
        assert {name: kind for name, kind in fields.items() if kind not in WIDER.get(name, found[name])} == {}


WIDER = {"devices": ["int", "int | Sequence[str | torch.device]"], "workers": ["WorkerKind"]}
"""Types that say less for one framework, or go by another name."""


def fields_of(path: Path) -> dict[str, str]:
    """Fields of the class ParallelizeOptions of a file, with their types as they are written."""
    options = next(n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == "ParallelizeOptions")
    return {n.target.id: ast.unparse(n.annotation).strip("'") for n in options.body if isinstance(n, ast.AnnAssign)}


def test_pages_are_of_the_names_that_are_handed_out_and_render_without_a_warning(tmp_path: Path) -> None:
    text = write(tmp_path).read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.rglob("*.html")) == ["baechi_ext.html", "index.html"]
    assert re.findall(r'<section id="(\w+)"', text) == baechi_ext.__all__
    assert {f'id="{name}"' for name in ("Run.what_if", "PlanOptions.link", "OpGraph.fingerprint")} <= set(re.findall(r'id="[\w.]+"', text))
