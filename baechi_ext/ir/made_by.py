"""MadeBy: where a file or a report comes from. Whoever writes one signs it with this; what is written does not depend on it."""

import platform
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from baechi_ext import __version__
from baechi_ext.errors import BaechiError
from baechi_ext.ir.files import read_json, write_json

FRAMEWORKS = ("torch", "tensorflow")
CONFIG = "config.toml"
"""The file in a run's folder that has the flags of the command that made it."""
T = TypeVar("T")


def versions() -> dict[str, str]:
    """Versions of baechi, Python and the frameworks that this process has loaded, by name: what did not run is not named."""
    loaded = {name: str(sys.modules[name].__version__) for name in FRAMEWORKS if hasattr(sys.modules.get(name), "__version__")}
    return {"baechi": __version__, "python": platform.python_version(), **loaded}


@dataclass(frozen=True, slots=True)
class MadeBy:
    """The command, word by word (nothing where it was none), and the versions of what ran, by name."""

    command: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=versions)

    @property
    def command_line(self) -> str:
        """The command as a line for a shell; what can't be shown is a question mark."""
        return _shown(shlex.join(self.command))

    @property
    def programs(self) -> str:
        """The versions, for people: `baechi 0.1.0, torch 2.13.0, Python 3.11.7`."""
        others = [f"{name} {version}" for name, version in self.versions.items() if name != "python"]
        return _shown(", ".join([*others, *(f"Python {version}" for name, version in self.versions.items() if name == "python")]))

    def __str__(self) -> str:
        return f"{self.command_line} ({self.programs})" if self.command else self.programs

    def to_json(self) -> dict[str, Any]:
        """The two fields that files and reports carry (docs/files.md)."""
        return {"command": list(self.command), "versions": dict(self.versions)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], error: type[BaechiError]) -> "MadeBy":
        """The maker that a file's object names; what it leaves out is empty. Raises `error` where a field is not what it should be."""
        command, named = value.get("command"), value.get("versions")
        if not isinstance(command, list | None):
            raise error(f'"command" is {command!r}; expected a list of words')
        if not isinstance(named, dict | None):
            raise error(f'"versions" is {named!r}; expected an object')
        return cls(tuple(map(str, command or ())), {str(name): str(version) for name, version in (named or {}).items()})


def signed(value: Mapping[str, Any], made_by: MadeBy | None) -> dict[str, Any]:
    """A file's or a report's object with who made it, where that is known."""
    return {**value, **({} if made_by is None else made_by.to_json())}


class Saved:
    """A value that is a JSON file as well: `to_json` makes the file's object."""

    def to_json(self) -> dict[str, Any]:
        """The file's object (docs/files.md)."""
        raise NotImplementedError

    def save(self, path: str | Path, made_by: MadeBy | None = None) -> None:
        """Writes the file, signed by `made_by` where that is given. Raises FileError."""
        write_json(path, signed(self.to_json(), made_by))


def load_as(path: str | Path, kind: str, make: Callable[[dict[str, Any]], T]) -> T:
    """The value that `make` makes of a JSON file's object. Raises FileError, and what `make` raises, with the file's name."""
    value = read_json(path, kind)
    try:
        return make(value)
    except BaechiError as e:
        raise type(e)(f"{path}: {e}") from e


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
