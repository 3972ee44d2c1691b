"""The Python API can be made from docstrings (`make docs`): each module has one, and pdoc renders those of the public names."""

import ast
import os
import re
import subprocess
import sys
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


USERS_FILE = """
import torch
from torch import nn
import baechi_ext

class Net(nn.Module):
    width = 3

@baechi_ext.parallelize(devices=2)
class Placed(nn.Module):
    width = 3

@baechi_ext.parallelize(method="m_etf", pins=["a=0"])
def make(width: int) -> Net:
    return Net()

run = baechi_ext.plan(Net(), (torch.ones(1),), devices=4, method="auto")
reveal_type(run)  # Run
reveal_type(run.what_if(devices=8, link="25GB/s").plan.placement)  # tuple[int, ...]
reveal_type(run.compare("m_etf", "single")["single"].step_us)  # float
reveal_type(run.explain("encoder.3").findings)  # PlanExplanation | OpChoices
reveal_type(baechi_ext.parallelize(Net(), devices=2, method="auto"))  # Net
reveal_type(baechi_ext.unplace(Net()))  # Net
reveal_type(baechi_ext.report(Net()).doubts)  # list[str]
reveal_type(Placed().width)  # int
reveal_type(make)  # def (width: int) -> Net
reveal_type(baechi_ext.OpGraph.load("graph.json").ops[0].compute_us)  # float
baechi_ext.parallelize(Net(), device=2)  # did you mean "devices"?
baechi_ext.plan(Net(), methods="auto")  # did you mean "method"?
run.what_if(link=25)  # expected "str | Link | None"
run.apply(keep=True)  # Unexpected keyword argument "keep"
baechi_ext.nonesuch  # no attribute "nonesuch"
"""
"""With what mypy says of each line behind it: the type, without the modules that it is from, or a part of an error."""


def test_a_type_checker_sees_real_types_in_a_users_file(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(USERS_FILE)
    environment = {**os.environ, "MYPYPATH": f"{ROOT}:{ROOT / 'runtime'}"}
    flags = "--config-file=", f"--cache-dir={tmp_path}", "--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent"
    command = [sys.executable, "-m", "mypy", *flags, "--hide-error-context", "users.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    said: dict[int, str] = {}
    for number, kind, message in re.findall(r"^users\.py:(\d+): (note: Revealed type is|error:) (.*)$", done.stdout, re.MULTILINE):
        said.setdefault(int(number), re.sub(r"\b\w+\.(?=\w)", "", message.strip('"')) if kind.startswith("note") else message)
    wanted = {number: line.partition("  # ")[2] for number, line in enumerate(USERS_FILE.splitlines(), start=1) if "  # " in line}
    assert set(said) == set(wanted), done.stdout + done.stderr
    assert {number: said[number] for number, text in wanted.items() if text not in said[number]} == {}
    types = {number: said[number] for number in wanted if "reveal_type" in USERS_FILE.splitlines()[number - 1]}
    assert types == {number: wanted[number] for number in types}
