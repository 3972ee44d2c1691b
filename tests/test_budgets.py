"""Budgets that keep the code readable: sizes, parameters, import cycles, prints."""

import ast
from pathlib import Path

import networkx as nx
import pytest

from tests.test_layers import ROOT, imports, modules

LINES_OF_A_FILE, LINES_OF_A_FUNCTION, PARAMETERS = 500, 60, 6
FILES = [*modules("baechi_ext"), *modules("runtime")]
each_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))


def lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@each_file
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES_OF_A_FILE


@each_file
def test_functions_are_short_and_take_few_parameters(path: Path) -> None:
    long = {f.name: n for f in functions(path) if (n := lines_without_docstring(f)) > LINES_OF_A_FUNCTION}
    assert long == {}
    wide = {}
    for f in functions(path):
        names = [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs) if a.arg not in ("self", "cls")]
        if len(names) > PARAMETERS:
            wide[f.name] = names
    assert wide == {}


@each_file
def test_only_the_command_line_prints(path: Path) -> None:
    if path.parent == ROOT / "runtime" / "commands":
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert [node.lineno for node in calls if node.func.id == "print"] == []


@each_file
def test_no_assert_pickle_or_eval(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)] == []
    assert {name.split(".")[0] for name in imports(path)} & {"pickle", "dill", "cloudpickle", "marshal"} == set()
    calls = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert {"eval", "exec"} & set(calls) == set()


def test_no_import_cycle() -> None:
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in FILES}
    graph = nx.DiGraph()
    for name, path in names.items():
        for target in imports(path, top_level=True):
            module = target if target in names else target.rpartition(".")[0]
            if module in names and module != name and not name.startswith(module + "."):
                graph.add_edge(name, module)
    assert list(nx.simple_cycles(graph)) == []


def test_the_measures_measure() -> None:
    function = ast.parse('def f(a):\n    """One.\n\n    Two.\n    """\n    return (\n        a\n    )\n').body[0]
    assert lines_without_docstring(function) == 4
