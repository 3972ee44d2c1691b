"""Options that a program gives by name, and those of `baechi_ext.parallelize`, as both frameworks check them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from baechi_ext.errors import OptionError
from baechi_ext.ir import Cluster
from baechi_ext.ir.numbers import as_number

T = TypeVar("T")


def chosen(options: type[T], given: Mapping[str, Any], of: str) -> T:
    """The options as given, a dataclass. Raises OptionError for an unknown one; `of` says whose they are."""
    require_known(given, [field.name for field in fields(options)], of)  # type: ignore[arg-type]
    return options(**given)


def require_known(given: Iterable[str], known: Sequence[str], of: str) -> None:
    """Raises OptionError for a name that is none of an option."""
    if unknown := [name for name in given if name not in known]:
        raise OptionError(f"unknown option {unknown[0]!r} of {of}; it takes {', '.join(known)}")


def require_sound(verify_steps: Any, cluster: Any) -> None:
    """Raises OptionError for what would fail in a training call."""
    as_number(verify_steps, "verify_steps", OptionError)
    if not isinstance(cluster, Cluster | None):
        raise OptionError(f"cluster={cluster!r} is not a baechi_ext.Cluster")
