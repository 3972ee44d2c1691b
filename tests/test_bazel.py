"""The BUILD files, read as the Python that they are: every file in one target, and a target's deps are its imports."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import networkx as nx
import pytest
from setuptools import find_packages

from tests.test_layers import FRAMEWORKS, ROOT, imports, nodes

EXCLUDED = {
    "setup.py": "pip runs it; no code imports it",
    "third_party/bazel/pytest_main.py": "the rule pytest_test adds it to every test",
    "tests/docs/test_api.py": "reads the whole source tree, which no target holds",
    "tests/docs/test_benchmarks.py": "reads pages beside what they name, which no target holds",
    "tests/docs/test_commands.py": "reads pages beside what they name, which no target holds",
    "tests/docs/test_container.py": "reads the whole source tree, which no target holds",
    "tests/docs/test_tutorial.py": "runs the commands of the checkout, which no target holds",
    "tests/examples/test_examples.py": "runs the commands of the checkout, which no target holds",
    "tests/test_bazel.py": "reads the whole source tree, which no target holds",
    "tests/test_budgets.py": "reads the whole source tree, which no target holds",
    "tests/test_layers.py": "reads the whole source tree, which no target holds",
    "tests/test_packaging.py": "reads the whole source tree, which no target holds",
}
"""Python files in no target, and why."""
RULES = ("py_library", "py_binary", "py_test", "pytest_test", "test_suite")
_MODULE = re.compile(r"[a-z_]\w*(?:\.\w+)+")
_FRONT_DOORS = ("baechi_ext/__init__.py", "baechi_ext/__main__.py", "baechi_ext/options.py")
_NOT_OURS = re.compile(r"\.|bazel-|(build|dist|runs|__pycache__)$|.*\.egg-info$")


@dataclass(frozen=True)
class Target:
    """A rule of a BUILD file; `srcs` are paths from the root, `deps` and `tests` full labels."""

    label: str
    rule: str
    srcs: tuple[str, ...]
    deps: tuple[str, ...]
    tests: tuple[str, ...]
    tags: tuple[str, ...]

    @property
    def is_test(self) -> bool:
        return self.rule in ("py_test", "pytest_test")


class Workspace:
    """All BUILD files below a folder, and what they should say."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = root / ".bazelignore"
        self._ignored = listed.read_text().split() if listed.exists() else []

    def walk(self) -> Iterator[Path]:
        """Files of the project: nothing hidden, built or linked."""
        for folder, names, files in os.walk(self.root):
            here = Path(folder).relative_to(self.root)
            names[:] = sorted(n for n in names if not _NOT_OURS.match(n) and str(here / n) not in self._ignored)
            yield from (here / name for name in sorted(files))

    @cached_property
    def packages(self) -> list[Path]:
        return [path.parent for path in self.walk() if path.name == "BUILD"]

    @cached_property
    def python_files(self) -> list[str]:
        return [str(path) for path in self.walk() if path.suffix == ".py"]

    @cached_property
    def targets(self) -> dict[str, Target]:
        found = chain.from_iterable(_Package(self, folder).targets() for folder in self.packages)
        return {target.label: target for target in found}

    @cached_property
    def owner(self) -> dict[str, str]:
        """File -> label of the target that holds it."""
        return {path: target.label for target in self.targets.values() for path in target.srcs}

    @cached_property
    def modules(self) -> dict[str, str]:
        """Dotted name -> file."""
        names = {".".join(Path(p).with_suffix("").parts).removesuffix(".__init__"): p for p in self.python_files}
        return {name.removeprefix("runtime."): path for name, path in names.items()}

    def package_of(self, path: Path) -> Path:
        return next(folder for folder in path.parents if folder in self.packages)

    def used_by(self, path: str) -> Iterator[str]:
        """Files that a file imports, names in a string (registries, `python -m`), or, for a test, is run with."""
        # What the library's front door imports when it is called stands above it; whoever calls it depends on that too.
        names = set(imports(self.root / path, top_level=path in _FRONT_DOORS))
        for node in nodes(self.root / path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE.match(node.value):
                names |= {node.value.split(":")[0]} & self.modules.keys()
        for name in names:
            module = name if name in self.modules else name.rpartition(".")[0]
            if module in self.modules:
                yield self.modules[module]
        if Path(path).name.startswith("test_"):
            yield from (str(c) for folder in Path(path).parents if str(c := folder / "conftest.py") in self.python_files)

    def needed_by(self, target: Target) -> set[str]:
        """The labels that the target's deps should be."""
        used = chain.from_iterable(self.used_by(path) for path in target.srcs)
        return {self.owner[path] for path in used if path not in EXCLUDED} - {target.label}

    def loads_framework(self, path: str) -> bool:
        """True if the test file, or what it loads of the project, imports a deep-learning framework."""
        seen, todo = {path}, [path]
        while todo:
            current = todo.pop()
            names = list(imports(self.root / current, top_level=current != path))
            if any(name.split(".")[0] in FRAMEWORKS for name in names):
                return True
            loaded = {self.modules.get(name) or self.modules.get(name.rpartition(".")[0]) for name in names} - {None}
            todo += loaded - seen
            seen |= loaded
        return False


class _Package:
    """One BUILD file."""

    def __init__(self, workspace: Workspace, folder: Path) -> None:
        self.workspace, self.folder = workspace, folder
        self.prefix = "//" + ("" if folder == Path() else str(folder))

    def targets(self) -> Iterator[Target]:
        tree = ast.parse((self.workspace.root / self.folder / "BUILD").read_text())
        for node in tree.body:
            if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call) or not isinstance(node.value.func, ast.Name):
                continue
            fields = {keyword.arg: keyword.value for keyword in node.value.keywords}
            if node.value.func.id in RULES:
                name, srcs, deps, tests, tags = (self.strings(fields.get(key)) for key in ("name", "srcs", "deps", "tests", "tags"))
                paths = tuple(map(self.path, srcs))
                labels = [tuple(map(self.label, some)) for some in (deps, tests)]
                yield Target(self.label(":" + name[0]), node.value.func.id, paths, *labels, tuple(tags))

    def strings(self, node: ast.expr | None) -> list[str]:
        if node is None:
            return []
        if isinstance(node, ast.BinOp):
            return self.strings(node.left) + self.strings(node.right)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "glob":
            exclude = next((keyword.value for keyword in node.keywords if keyword.arg == "exclude"), None)
            return sorted(self.glob(self.strings(node.args[0])) - self.glob(self.strings(exclude)))
        value = ast.literal_eval(node)
        return [value] if isinstance(value, str) else list(value)

    def glob(self, patterns: Iterable[str]) -> set[str]:
        here = self.workspace.root / self.folder
        found = {p.relative_to(self.workspace.root) for pattern in patterns for p in here.glob(pattern)}
        return {str(p.relative_to(self.folder)) for p in found if self.workspace.package_of(p) == self.folder}

    def label(self, text: str) -> str:
        if text.startswith(":"):
            return self.prefix + text
        return text if ":" in text else f"{text}:{text.rpartition('/')[2]}"

    def path(self, text: str) -> str:
        return text[2:].replace(":", "/").lstrip("/") if text.startswith("//") else str(self.folder / text.lstrip(":"))


OURS = Workspace(ROOT)
LIBRARIES_AND_TESTS = [label for label, target in OURS.targets.items() if target.rule != "test_suite"]


@pytest.mark.parametrize("label", LIBRARIES_AND_TESTS)
def test_deps_are_imports(label: str) -> None:
    target = OURS.targets[label]
    needed, given = OURS.needed_by(target), target.deps
    assert len(given) == len(set(given))
    assert (sorted(needed - set(given)), sorted(set(given) - needed)) == ([], []), f"deps of {label}: (missing, needless)"


def test_every_file_is_in_one_target() -> None:
    count = Counter(path for target in OURS.targets.values() for path in target.srcs)
    assert [path for path in OURS.python_files if count[path] + (path in EXCLUDED) != 1] == []
    assert set(EXCLUDED) | set(count) == set(OURS.python_files)


def test_every_test_file_is_in_a_test() -> None:
    for target in OURS.targets.values():
        if target.rule == "py_library":
            assert [path for path in target.srcs if Path(path).name.startswith("test_")] == [], target.label
        elif target.is_test:
            assert [path for path in target.srcs if not Path(path).name.startswith("test_")] == [], target.label


def test_no_target_depends_on_itself() -> None:
    edges = [(target.label, dep) for target in OURS.targets.values() for dep in target.deps]
    assert list(nx.simple_cycles(nx.DiGraph(edges))) == []


def test_the_suite_is_the_tests_without_a_framework() -> None:
    tests = {label: target for label, target in OURS.targets.items() if target.is_test}
    free = {label for label, target in tests.items() if "framework" not in target.tags}
    assert set(OURS.targets["//:framework_free_tests"].tests) == free
    for label, target in tests.items():
        loads = [path for path in target.srcs if OURS.loads_framework(path)]
        assert bool(loads) == ("framework" in target.tags), f"{label}: {loads}"


def test_the_programs_are_there() -> None:
    programs = {target.label for target in OURS.targets.values() if target.rule == "py_binary"}
    assert programs == {"//:train", "//:baechi", "//:communication_benchmark"}


# The reader


def make_tree(root: Path, files: dict[str, str]) -> Workspace:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return Workspace(root)


@pytest.fixture
def small(tmp_path: Path) -> Workspace:
    """a imports b.c and names b.d in a string; tests/t holds a test; b has a folder of its own package and one without."""
    build = 'py_library(\n    name = "b",\n    srcs = glob(["**/*.py"], exclude = ["no*.py"]) + [":no.py"],\n)\n'
    files = {
        "BUILD": 'py_library(name = "a", srcs = ["a.py"], deps = ["//b", "//b/own:x"])\n[f(n) for n in []]\n',
        "a.py": "from b.c import x\nTABLE = {'d': 'b.in.d:run'}\nTEXT = 'b.in.gone:run'\n",
        "b/BUILD": build,
        "b/c.py": "",
        "b/no.py": "import b.c\n",
        "b/in/d.py": "",
        "b/own/BUILD": 'py_library(name = "x", srcs = ["e.py"])\n',
        "b/own/e.py": "import torch\n",
        "tests/BUILD": 'py_library(name = "tests", srcs = ["conftest.py"])\n',
        "tests/conftest.py": "",
        "tests/t/BUILD": 'pytest_test(name = "t", srcs = glob(["test_*.py"]), deps = ["//tests"])\n',
        "tests/t/test_e.py": "def f():\n    import b.own.e\n",
        "tests/t/test_c.py": "import b.c\n",
        ".venv/f.py": "",
        ".bazelignore": "third_party\n",
        "third_party/BUILD": "",
    }
    workspace = make_tree(tmp_path, files)
    (tmp_path / "bazel-out").symlink_to(tmp_path / "b", target_is_directory=True)
    return workspace


def test_the_reader_sees_files_and_packages(small: Workspace) -> None:
    assert small.python_files == [
        "a.py", "b/c.py", "b/no.py", "b/in/d.py", "b/own/e.py", "tests/conftest.py", "tests/t/test_c.py", "tests/t/test_e.py",
    ]  # fmt: skip
    assert list(small.targets) == ["//:a", "//b:b", "//b/own:x", "//tests:tests", "//tests/t:t"]
    assert sorted(small.targets["//b:b"].srcs) == ["b/c.py", "b/in/d.py", "b/no.py"]


def test_the_reader_sees_missing_and_needless_deps(small: Workspace) -> None:
    given = small.targets["//:a"]
    assert (given.deps, small.needed_by(given)) == (("//b:b", "//b/own:x"), {"//b:b"})
    assert small.needed_by(small.targets["//b:b"]) == set()
    assert small.needed_by(small.targets["//tests/t:t"]) == {"//b:b", "//b/own:x", "//tests:tests"}
    assert [small.loads_framework(f"tests/t/test_{name}.py") for name in "ce"] == [False, True]


# The repositories, the launcher, and what else walks the tree


def test_nothing_is_downloaded() -> None:
    lines = (ROOT / ".bazelrc").read_text().splitlines()
    assert "build --experimental_repository_disable_download" in lines
    for path in [ROOT / "WORKSPACE", *(ROOT / "third_party" / "bazel").rglob("*")]:
        if path.is_file() and path.suffix != ".pyc":
            text = path.read_text()
            assert "http" not in text, path
            assert not re.search(r"\bgit_repository|http_archive", text), path


def test_programs_need_no_program_called_python() -> None:
    assert 'register_toolchains("//third_party/bazel:python_toolchain")' in (ROOT / "WORKSPACE").read_text()
    assert '    stub_shebang = "#!/usr/bin/env python3",' in (ROOT / "third_party" / "bazel" / "BUILD").read_text()


def test_every_local_repository_is_there_and_no_package_of_ours() -> None:
    names = re.findall(r'^        "(\w+)",$', (ROOT / "WORKSPACE").read_text(), re.MULTILINE)
    assert len(names) == 4
    for name in names:
        assert (ROOT / "third_party" / "bazel" / name / "WORKSPACE").read_text() == f'workspace(name = "{name}")\n'
    assert {f"third_party/bazel/{name}" for name in names} | {".venv", ".venv-compat", ".venv-cuda-stub"} == set(
        (ROOT / ".bazelignore").read_text().split()
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose launcher stands in runfiles as Bazel makes them: links in a folder of their own."""
    source, runfiles = tmp_path / "source", tmp_path / "runfiles"
    shutil.copytree(ROOT / "third_party" / "bazel", source / "third_party" / "bazel")
    linked = runfiles / "third_party" / "bazel"
    linked.mkdir(parents=True)
    for path in (source / "third_party" / "bazel").glob("*.py"):
        (linked / path.name).symlink_to(path)
    return tmp_path


def start(checkout: Path, *arguments: str) -> subprocess.CompletedProcess:
    runfiles = checkout / "runfiles"
    environment = {**os.environ, "PYTHONPATH": str(runfiles)}
    command = [sys.executable, str(runfiles / "third_party" / "bazel" / "train_main.py"), *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)


def test_without_an_environment_one_line_says_what_to_do(checkout: Path) -> None:
    done = start(checkout, "--help")
    assert (done.returncode, done.stdout) == (1, "")
    source = checkout / "source"
    assert done.stderr == f"error: there is no {source}/.venv/bin/python; run `make .venv/installed` in {source} first\n"


def test_a_program_starts_again_in_the_checkouts_environment(checkout: Path) -> None:
    python = checkout / "source" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$PYTHONPATH" "$PYTHONSAFEPATH"\nprintf "%s\\n" "$@"\nexit 3\n')
    python.chmod(0o755)
    done = start(checkout, "--model_name=a b", "--json")
    assert (done.returncode, done.stderr) == (3, "")
    first, *arguments = done.stdout.splitlines()
    runfiles = str(checkout / "runfiles")
    assert first == f"{os.pathsep.join([runfiles, f'{runfiles}/runtime', runfiles])} 1"
    assert arguments == ["-m", "baechi_runtime.__main__", "train", "--model_name=a b", "--json"]


def test_setup_packages_nothing_that_bazel_links(tmp_path: Path) -> None:
    make_tree(tmp_path, {"runtime/baechi_runtime/__init__.py": "", "runtime/baechi_runtime/x/__init__.py": ""})
    for name in ("bazel-bin", "bazel-main"):
        (tmp_path / name).symlink_to(tmp_path, target_is_directory=True)
    assert find_packages(str(tmp_path / "runtime")) == ["baechi_runtime", "baechi_runtime.x"]
    assert find_packages(str(tmp_path), include=["baechi_ext*"]) == []
