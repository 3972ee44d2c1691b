"""Budgets that keep the code readable: sizes, parameters, import cycles, prints."""

import ast
import re
from pathlib import Path

import networkx as nx
import pytest

from tests.test_layers import ROOT, imports, modules, parsed

LINES_OF_A_FILE, LINES_OF_A_FUNCTION, PARAMETERS = 500, 60, 6
FILES = [*modules("baechi_ext"), *modules("runtime/baechi_runtime")]
each_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))


def lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = parsed(path)
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
    if path.parent == ROOT / "runtime" / "baechi_runtime" / "cli" / "commands":
        return
    tree = parsed(path)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert [node.lineno for node in calls if node.func.id == "print"] == []


UNPICKLES = re.compile(
    r"(\w+\.)*(all_gather_object|gather_object|(broadcast|scatter|send|recv)_object_list)|torch(\.serialization)?\.load|yaml\.load"
)
"""Calls that execute, or may execute, what they read or what peers send."""


@each_file
def test_no_assert_pickle_or_eval(path: Path) -> None:
    tree = parsed(path)
    assert [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)] == []
    assert {name.split(".")[0] for name in imports(path)} & {"pickle", "dill", "cloudpickle", "marshal", "joblib", "shelve"} == set()
    assert [name for name in imports(path) if UNPICKLES.fullmatch(name)] == []
    assert [f"line {line}: {call}" for line, call in dotted_calls(tree) if UNPICKLES.fullmatch(call)] == []
    calls = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert {"eval", "exec"} & set(calls) == set()


def dotted_calls(tree: ast.AST) -> list[tuple[int, str]]:
    """The lines and the names of what is called by a name with dots."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [(call.lineno, ast.unparse(call.func)) for call in calls]


@pytest.mark.parametrize("code", ["dist.all_gather_object(a, b)", "torch.load(f)", "x = torch.distributed.recv_object_list(a)"])
def test_calls_that_unpickle_are_found(code: str) -> None:
    assert any(UNPICKLES.fullmatch(call) for _, call in dotted_calls(ast.parse(code)))


def test_no_import_cycle() -> None:
    """Imports inside functions and for types count, too."""
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in FILES}
    graph = nx.DiGraph()
    for name, path in names.items():
        for target in imports(path):
            module = target if target in names else target.rpartition(".")[0]
            if module in names and module != name and not name.startswith(module + "."):
                graph.add_edge(name, module)
    assert list(nx.simple_cycles(graph)) == []


def test_the_measures_measure() -> None:
    function = ast.parse('def f(a):\n    """One.\n\n    Two.\n    """\n    return (\n        a\n    )\n').body[0]
    assert lines_without_docstring(function) == 4


def docstrings(path: Path) -> list[tuple[int, str]]:
    """Lines and texts of a file's docstrings, those below fields included."""
    bodies = [getattr(node, "body", None) for node in ast.walk(parsed(path))]
    strings = [line.value for body in bodies if isinstance(body, list) for line in body if isinstance(line, ast.Expr)]
    return [(s.lineno, s.value) for s in strings if isinstance(s, ast.Constant) and isinstance(s.value, str)]


@pytest.mark.parametrize("path", [*FILES, *modules("benchmarks")], ids=lambda p: str(p.relative_to(ROOT)))
def test_docstrings_open_with_a_verb_or_the_thing(path: Path) -> None:
    found = {line: text.split()[0] for line, text in docstrings(path) if text.split()}
    assert {line: word for line, word in found.items() if word in ("What", "Whether", "How", "Of")} == {}
