"""Who may import whom, and what importing the library may load."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = {
    "errors": set(),
    "collector": set(),
    "stderr": set(),
    "python_process": set(),
    "die_with_parent": set(),
    "options": {"ir"},
    "ir": {"errors", "collector"},
    "datasets": {"errors", "ir"},
    "capture": {"errors", "ir", "stderr"},
    "cost": {"errors", "ir"},
    "simulate": {"errors", "ir", "capture", "cost"},
    "group": {"errors", "ir", "capture", "cost"},
    "place": {"errors", "ir", "datasets", "capture", "cost", "group", "simulate", "python_process", "die_with_parent", "stderr"},
    "shard": {"errors", "ir", "capture", "cost", "group", "simulate"},
    "explain": {"errors", "ir", "cost", "simulate"},
    "hybrid": {"errors", "ir", "capture", "cost", "group", "simulate", "place", "shard"},
}
"""The parts that each part of baechi_ext may import besides itself."""
RUNTIME = {
    "host": set(),
    "files": set(),
    "measure": set(),
    "models": set(),
    "models.options": set(),
    "models.torch": {"models", "models.options"},
    "models.tensorflow": {"models", "models.options"},
    "report": {"files", "measure"},
    "report.page": {"files", "measure", "report"},
    "placeto": {"host", "report"},
    "drivers": {"files", "host", "measure", "models", "report"},
    "torch.lowering": {"files", "host", "measure", "models"},
    "torch.threads": {"files", "host", "measure", "models", "torch.lowering"},
    "torch.streams": {"files", "measure", "models", "torch.lowering", "torch.threads"},
    "torch.processes": {"files", "host", "measure", "models", "torch.lowering", "torch.streams", "torch.threads"},
    "torch": {
        *("drivers", "files", "host", "measure", "models", "report"),
        *("torch.lowering", "torch.processes", "torch.streams", "torch.threads"),
    },
    "torch.calls": {
        *("drivers", "files", "host", "measure", "report"),
        *("torch", "torch.lowering", "torch.processes", "torch.streams", "torch.threads"),
    },
    "tensorflow.lowering": set(),
    "tensorflow.servers": {"host", "measure", "tensorflow.lowering"},
    "tensorflow": {"drivers", "files", "host", "measure", "models", "report", "tensorflow.lowering", "tensorflow.servers"},
    "tensorflow.calls": {
        *("drivers", "files", "host", "measure", "models", "report"),
        *("tensorflow", "tensorflow.lowering", "tensorflow.servers"),
    },
    "sharding": {"drivers", "files", "host", "measure", "models", "report", "torch", "torch.calls", "torch.lowering", "torch.processes"},
    "datasets": {"host", "models", "models.options", "models.torch", "report", "torch", "torch.lowering", "torch.threads"},
    "library": {"drivers", "files", "host", "measure", "models", "report", "report.page", "tensorflow.calls", "torch", "torch.calls"},
    "cli.doctor": {"host", "report", "torch.lowering"},
    "cli.flags": {"drivers", "host", "models", "models.options", "placeto", "report", "sharding", "tensorflow"},
    "cli.commands": {
        *("cli.doctor", "cli.flags", "datasets", "drivers", "host", "library", "report", "report.page", "sharding"),
        *("torch.lowering", "torch.processes"),
    },
    "cli": {"cli.commands", "cli.doctor", "cli.flags", "host", "report"},
    "": {"cli", "host"},
}
"""The folders that each folder of baechi_runtime may import besides itself, imports inside functions and for types included. The package
itself holds nothing, so anybody may import it."""
FILES_AT_THE_TOP = 8
FRAMEWORKS = {"torch", "tensorflow", "torchvision", "jax"}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a file's syntax tree, the module first."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports(path: Path, *, top_level: bool = False) -> tuple[str, ...]:
    """Dotted names of all modules that a file imports; with `top_level`, of those that importing it loads."""
    found: list[str] = []
    for node in _outside_functions(nodes(path)[0]) if top_level else nodes(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(child):
            continue
        yield child
        yield from _outside_functions(child)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def test_the_walker_sees_what_is_loaded(tmp_path: Path) -> None:
    code = "import a\ndef f():\n    import b\nclass C:\n    from c import d\ntry:\n    import e.f\nfinally:\n    pass\n"
    (tmp_path / "x.py").write_text(code)
    assert set(imports(tmp_path / "x.py")) == {"a", "b", "c.d", "e.f"}
    assert set(imports(tmp_path / "x.py", top_level=True)) == {"a", "c.d", "e.f"}


@pytest.mark.parametrize("path", modules("baechi_ext"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_library_imports_downwards(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    own = parts[1]
    if own in ("__init__", "__main__"):  # what the front door loads when it is called stands above the library
        allowed: set[str] = {"errors"}
        found = imports(path, top_level=True)
    else:
        assert own in LIBRARY, f"baechi_ext/{own} has no place in the import direction"
        allowed = LIBRARY[own] | {own, "__version__"}
        found = imports(path)
    for name in found:
        head, *rest = name.split(".")
        assert head not in {"baechi_runtime", "benchmarks", "tests"}, f"{path} imports {name}"
        if head == "baechi_ext" and rest:
            assert rest[0] in allowed, f"{path} imports {name}"


@pytest.mark.parametrize("path", modules("baechi_ext/place"), ids=lambda p: str(p.relative_to(ROOT)))
def test_placers_never_import_each_other(path: Path) -> None:
    from baechi_ext.place.registry import METHODS

    placers = {entry[0].split(":")[0] for entry in METHODS.values()}
    own = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for name in imports(path):
        others = {p for p in placers if p != own and not own.startswith(p.rpartition(".")[0] + ".placeto")}
        assert not any(name == p or name.startswith(p + ".") for p in others), f"{path} imports {name}"


@pytest.mark.parametrize("path", modules("runtime/baechi_runtime"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_runtime_imports_downwards(path: Path) -> None:
    own = folder_of(path)
    assert own in RUNTIME, f"baechi_runtime/{own} has no place in the import direction"
    for name in imports(path):
        head, *rest = name.split(".")
        assert head not in {"benchmarks", "tests"}, f"{path} imports {name}"
        if head == "baechi_runtime" and rest:
            found = max((f for f in RUNTIME if name.startswith(f"baechi_runtime.{f}.")), key=len, default="")
            assert found in RUNTIME[own] | {own}, f"{path} imports {name}"


def folder_of(path: Path) -> str:
    """The folder of a module of baechi_runtime, with dots."""
    return ".".join(path.relative_to(ROOT / "runtime" / "baechi_runtime").parts[:-1])


def test_no_two_folders_import_each_other() -> None:
    graph = nx.DiGraph([(own, other) for own, others in RUNTIME.items() for other in others])
    assert list(nx.simple_cycles(graph)) == []
    assert set(RUNTIME) == {folder_of(path) for path in modules("runtime/baechi_runtime")}


def test_few_files_are_at_the_top() -> None:
    assert len([p for p in (ROOT / "runtime" / "baechi_runtime").iterdir() if p.is_file()]) <= FILES_AT_THE_TOP


def test_the_library_names_no_framework_when_it_is_imported() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules("baechi_ext")
        for name in imports(path, top_level=True)
        if name.split(".")[0] in FRAMEWORKS
    ]
    assert found == []


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nsys.stdout.write(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def test_importing_every_module_of_the_library_loads_no_framework() -> None:
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in modules("baechi_ext")]
    loaded = loaded_by(f"import importlib\nfor name in {names!r}: importlib.import_module(name)")
    assert "baechi_ext" in loaded
    assert loaded & FRAMEWORKS == set()


def test_the_values_that_the_library_hands_out_load_no_framework() -> None:
    loaded = loaded_by("import baechi_ext\nfor name in dir(baechi_ext): getattr(baechi_ext, name)")
    assert "baechi_runtime" in loaded
    assert loaded & FRAMEWORKS == set()


def test_the_command_line_loads_no_framework_no_solver_and_no_compiler() -> None:
    loaded = loaded_by("import baechi_runtime.cli.main")
    assert "baechi_runtime" in loaded
    assert loaded & (FRAMEWORKS | {"pulp", "highspy", "ortools", "numba", "llvmlite", "numpy"}) == set()


# The parts of torch that are not public


def private_names(path: Path) -> Iterator[str]:
    """Dotted names of torch in a file with a part that begins with an underscore."""
    if "torch" not in path.read_text(encoding="utf-8"):
        return
    alias = {}
    for node in nodes(path):
        if isinstance(node, ast.Import):
            alias |= {a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            alias |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    chains = (_chain(node) for node in nodes(path) if isinstance(node, ast.Attribute))
    found = {f"{alias[first]}{rest}" for first, rest in chains if first in alias}
    for name in sorted({*imports(path), *found}):
        head, *rest = name.split(".")
        if head == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest):
            yield name


def _chain(node: ast.AST) -> tuple[str, str]:
    """The name that a chain of attributes begins with, empty where it begins with none, and the rest of it, calls left out."""
    rest = ""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            node, rest = node.value, f".{node.attr}{rest}"
        elif isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            return "", rest
    return node.id, rest


def test_private_names_are_seen(tmp_path: Path) -> None:
    code = "import torch._a\nimport torch.distributed as dist\ndef f():\n    from torch import fx, nn as n\n    from torch._b.c import d\n"
    (tmp_path / "x.py").write_text(code + "    dist.e._f(n._g.h(), n.__name__, fx.i, f._j, torch.k)\n")
    assert list(private_names(tmp_path / "x.py")) == ["torch._a", "torch._b.c.d", "torch.distributed.e._f", "torch.nn._g", "torch.nn._g.h"]


def test_only_one_module_of_the_library_and_of_the_loops_uses_what_is_private_in_torch() -> None:
    paths = [path for package in ("baechi_ext", "runtime/baechi_runtime", "benchmarks", "tests") for path in modules(package)]
    assert {str(path.relative_to(ROOT)) for path in paths if list(private_names(path))} == {
        "baechi_ext/capture/torch_dynamo.py",
        "baechi_ext/capture/torch_guards.py",
        "baechi_ext/capture/torch_private.py",
        "benchmarks/hostile/torch_private.py",
        "tests/cuda_stub/kernels.py",
        "tests/runtime/sharding/test_layout.py",
    }
