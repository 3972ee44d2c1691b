"""Budgets that keep the code readable: sizes, parameters, import cycles, prints."""

import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import networkx as nx
import pytest

from tests.test_layers import ROOT, imports, modules, nodes

LINES_OF_A_FILE, LINES_OF_A_FUNCTION, PARAMETERS = 500, 60, 6
FILES = [*modules("baechi_ext"), *modules("runtime/baechi_runtime")]


def files_with(findings: Callable[[Path], object]) -> dict[str, object]:
    """The findings of each file that has any."""
    return {str(path.relative_to(ROOT)): found for path in FILES if (found := findings(path))}


def lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def calls_of(path: Path, *names: str) -> list[int]:
    """The lines in which a file calls functions of these names."""
    calls = [node for node in nodes(path) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return [node.lineno for node in calls if node.func.id in names]


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert files_with(lambda path: lengths[path] > LINES_OF_A_FILE and lengths[path]) == {}


def test_functions_are_short() -> None:
    assert files_with(lambda path: [f.name for f in functions(path) if lines_without_docstring(f) > LINES_OF_A_FUNCTION]) == {}


def test_functions_take_few_parameters() -> None:
    def parameters(f: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
        return [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs) if a.arg not in ("self", "cls")]

    assert files_with(lambda path: [f.name for f in functions(path) if len(parameters(f)) > PARAMETERS]) == {}


def test_only_the_command_line_prints() -> None:
    commands = ROOT / "runtime" / "baechi_runtime" / "cli" / "commands"
    assert files_with(lambda path: path.parent != commands and calls_of(path, "print")) == {}


UNPICKLES = re.compile(
    r"(\w+\.)*(all_gather_object|gather_object|(broadcast|scatter|send|recv)_object_list)|torch(\.serialization)?\.load|yaml\.load"
)
"""Calls that execute, or may execute, what they read or what peers send."""


def test_no_assert_pickle_or_eval() -> None:
    pickles = {"pickle", "dill", "cloudpickle", "marshal", "joblib", "shelve"}
    assert files_with(lambda path: [node.lineno for node in nodes(path) if isinstance(node, ast.Assert)]) == {}
    assert files_with(lambda path: {name.split(".")[0] for name in imports(path)} & pickles) == {}
    assert files_with(lambda path: [name for name in imports(path) if UNPICKLES.fullmatch(name)]) == {}
    assert files_with(lambda path: [f"line {line}: {call}" for line, call in dotted_calls(nodes(path)) if UNPICKLES.fullmatch(call)]) == {}
    assert files_with(lambda path: calls_of(path, "eval", "exec")) == {}


def dotted_calls(tree: Iterable[ast.AST]) -> list[tuple[int, str]]:
    """The lines and the names of what is called by a name with dots."""
    calls = [node for node in tree if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [(call.lineno, ast.unparse(call.func)) for call in calls]


@pytest.mark.parametrize("code", ["dist.all_gather_object(a, b)", "torch.load(f)", "x = torch.distributed.recv_object_list(a)"])
def test_calls_that_unpickle_are_found(code: str) -> None:
    assert any(UNPICKLES.fullmatch(call) for _, call in dotted_calls(ast.walk(ast.parse(code))))


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
    bodies = [getattr(node, "body", None) for node in nodes(path)]
    strings = [line.value for body in bodies if isinstance(body, list) for line in body if isinstance(line, ast.Expr)]
    return [(s.lineno, s.value) for s in strings if isinstance(s, ast.Constant) and isinstance(s.value, str)]


def test_docstrings_open_with_a_verb_or_the_thing() -> None:
    found = [(path, line, text.split()[0]) for path in [*FILES, *modules("benchmarks")] for line, text in docstrings(path) if text.split()]
    assert [(str(path), line, word) for path, line, word in found if word in ("What", "Whether", "How", "Of")] == []
