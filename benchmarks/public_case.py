"""A public training script, as `benchmarks/public_scripts.json` names it, and the folder that it runs in."""

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from typing import Any

from baechi_ext.errors import FileError
from baechi_ext.ir.files import read_json
from benchmarks.public_data import WRITERS

CASES = Path(__file__).with_name("public_scripts.json")
STUBS = Path(__file__).with_name("public_stubs")


@dataclass(frozen=True)
class Case:
    """One script of a repository at a commit.

    `folder` is where it is started, by default its own; `arguments` are the command line's. `numbers` are what is changed in its files:
    each a file, a text that is in it, and a text in its stead, for lengths, paths, seeds and devices that no argument sets. `data` are
    files that are written for it (benchmarks.public_data), `before` are commands of its repository that make its data. `outputs` are files
    that it writes numbers into, beside what it prints; with `stderr` its progress bars' numbers count, too. `packages` it imports that this
    project does not need; `paths` of its repository are searched for modules. A repository that is started by a name that pip makes has
    that as `entry`, module:function. `seeded` is the file of a script without a seed of its own: its first line imports public_seed.
    """

    name: str
    kind: str
    repository: str
    commit: str
    script: str = ""
    entry: str = ""
    folder: str | None = None
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    numbers: tuple[Mapping[str, str], ...] = ()
    data: tuple[Mapping[str, Any], ...] = ()
    before: tuple[tuple[str, ...], ...] = ()
    outputs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    stderr: bool = False
    seeded: str = ""

    @property
    def checkout(self) -> str:
        """The name of its repository's folder."""
        return self.repository.replace("/", "+")

    def where(self, work: Path) -> Path:
        """The folder that it is started in."""
        return work / (Path(self.script).parent if self.folder is None else self.folder)

    def program(self, work: Path) -> Path:
        """Its file, as it is named where it is started."""
        return Path("started.py") if self.entry else Path(os.path.relpath(work / self.script, self.where(work)))


def load_cases(only: Sequence[str] = ()) -> list[Case]:
    """Those of the file whose names are in `only`, or all. Raises FileError for a name that is none."""
    found = []
    for row in read_json(CASES, "list of scripts")["scripts"]:
        lists = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
        if "before" in lists:
            lists["before"] = tuple(tuple(command) for command in lists["before"])
        found.append(Case(**{**row, **lists}))
    if unknown := set(only) - {case.name for case in found}:
        raise FileError(f"no script named {', '.join(sorted(unknown))}; there are {', '.join(case.name for case in found)}")
    return [case for case in found if not only or case.name in only]


def missing(case: Case, sources: Path, packages: Path | None) -> str | None:
    """Why a case cannot run here, with the commands that help; None where it can."""
    folder = sources / case.checkout
    commit = ["git", "-C", str(folder), "cat-file", "-e", f"{case.commit}^{{commit}}"]
    if not folder.is_dir() or subprocess.run(commit, capture_output=True).returncode:
        url = f"https://github.com/{case.repository}"
        return f"commit {case.commit[:12]} is not in {case.checkout}: git clone {url} {case.checkout}"
    here = [name for name in case.packages if not (packages is not None and (packages / name).exists()) and find_spec(name) is None]
    return f"needs {', '.join(here)}: pip install --no-deps --target=FOLDER, and --packages=FOLDER" if here else None


def prepare(case: Case, sources: Path, work: Path, environment: Mapping[str, str]) -> None:
    """Fills `work` with the files of the case's commit, its numbers changed and its data written; what was in it is gone.

    Raises FileError where a text to change is not in its file, or a command before the script fails.
    """
    rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    _extract(sources / case.checkout, case.commit, work)
    for change in case.numbers:
        path = work / change["file"]
        text = path.read_text(encoding="utf-8")
        if change["old"] not in text:
            raise FileError(f"{case.name}: {change['old']!r} is not in {change['file']}")
        path.write_text(text.replace(change["old"], change["new"]), encoding="utf-8")
    where = case.where(work)
    if case.entry:
        module, _, function = case.entry.partition(":")
        (where / "started.py").write_text(f"import sys\n\nfrom {module} import {function}\n\nsys.exit({function}())\n", encoding="utf-8")
    if case.seeded:
        path = work / case.seeded
        path.write_text(f"import public_seed\n{path.read_text(encoding='utf-8')}", encoding="utf-8")
    for data in case.data:
        path = where / data["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        WRITERS[data["kind"]](path, **{name: value for name, value in data.items() if name not in ("path", "kind")})
    for command in case.before:
        done = subprocess.run([sys.executable, *command], cwd=where, env=dict(environment), capture_output=True, text=True)
        if done.returncode:
            raise FileError(f"{case.name}: {' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-300:]}")


def _extract(checkout: Path, commit: str, work: Path) -> None:
    """Writes the files of a commit into `work`; those that a partial clone lacks are left out."""

    def git(*words: str, given: bytes = b"") -> bytes:
        return subprocess.run(["git", "-C", str(checkout), *words], input=given, capture_output=True, check=True).stdout

    entries = [entry.split(b"\t", 1) for entry in git("ls-tree", "-r", "-z", commit).split(b"\0") if entry]
    objects = [about.split()[2] for about, _ in entries]
    checked = git("cat-file", "--batch-check", given=b"\n".join(objects) + b"\n").splitlines()
    gone = {line.split()[0] for line in checked if line.endswith(b"missing")}
    absent = [f":(exclude,literal){path.decode()}" for (_, path), name in zip(entries, objects, strict=True) if name in gone]
    archive = git("archive", commit, "--", ".", *absent)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(work, filter="data")
