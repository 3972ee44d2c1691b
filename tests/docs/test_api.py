"""The Python API can be made from docstrings (`make docs`): each module has one, and pdoc renders them without a warning."""

import ast
import re
from pathlib import Path

import pdoc
import pytest

import baechi_ext
from tests.docs.pages import ROOT
from tests.test_layers import modules

RENDERED = tuple(f"baechi_ext.{name}" for name in ("errors", "ir.op_graph", "place.registry", "place.placeto.policy", "simulate"))
"""Among them NamedTuples of tensors, and what is only imported for type checkers."""


@pytest.mark.parametrize("path", modules("baechi_ext"), ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_classes_say_what_they_are(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    assert [node.name for node in classes if not ast.get_docstring(node)] == []


def test_the_front_door_says_what_it_takes() -> None:
    text = baechi_ext.parallelize.__doc__
    assert "Raises MissingBackendError" in text
    for name in re.findall(r"baechi_runtime[\w.]+\.ParallelizeOptions", text):
        source = ROOT / "runtime" / (name.rpartition(".")[0].replace(".", "/") + ".py")
        options = next(n for n in ast.parse(source.read_text()).body if isinstance(n, ast.ClassDef) and n.name == "ParallelizeOptions")
        assert ast.get_docstring(options)


def test_pages_are_rendered_without_a_warning(tmp_path: Path) -> None:
    pdoc.pdoc(*RENDERED, *(f"!{name}\\..*" for name in RENDERED), output_directory=tmp_path)
    for name in RENDERED:
        page = tmp_path / (name.replace(".", "/") + ".html")
        assert page.stat().st_size > 5000
    assert "fingerprint" in (tmp_path / "baechi_ext" / "ir" / "op_graph.html").read_text(encoding="utf-8")
