"""Numbers that environment variables say."""

import os
from collections.abc import Mapping

from baechi_ext.errors import OptionError


def number_of(name: str, default: int, environment: Mapping[str, str] = os.environ, least: int = 1) -> int:
    """The whole number in a variable that torchrun and others set; the default where it is not set. Raises OptionError for other text."""
    text = environment.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= least):
        raise OptionError(f"${name} is {text!r}; expected a whole number from {least} on: unset it, or start the workers by torchrun")
    return int(text)
