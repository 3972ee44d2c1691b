"""Values of files, checked by what the fields of a dataclass may be."""

import sys
from typing import Annotated, TypeVar

from msgspec import Meta, ValidationError, convert

T = TypeVar("T")
_FINITE = sys.float_info.max
Number = Annotated[float, Meta(ge=0, le=_FINITE)]
"""A finite number of 0 or more."""
Signed = Annotated[float, Meta(ge=-_FINITE, le=_FINITE)]
"""Any finite number."""
Share = Annotated[float, Meta(ge=0, le=1)]
Index = Annotated[int, Meta(ge=0)]
Bytes = Index | Number
Count = Annotated[int, Meta(ge=1)]
"""A whole number of 1 or more."""


def checked(value: object, kind: type[T], what: str, error: type[Exception]) -> T:
    """The object of a parsed file as a value of this dataclass; fields that it does not have are left out. Raises `error`, which says where
    in the object something else was found than expected."""
    try:
        return convert(value, kind)
    except (ValidationError, OverflowError, UnicodeEncodeError) as e:  # the last: half a character, as JSON may hold
        raise error(f"the {what} is broken: {e}; write it again") from e
