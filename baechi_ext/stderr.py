"""The lines that libraries write to stderr, C++ ones too, without those that no user needs."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

_STDERR = 2


def nameless_file() -> BinaryIO:
    """A file that ends with its last holder: in memory, where the system has such, so that no folder for temporary files is needed."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("baechi"), "w+b")
    return cast(BinaryIO, tempfile.TemporaryFile())


@contextmanager
def stderr_without(marker: bytes) -> Iterator[None]:
    """While its body runs, lines on stderr that hold the marker, all of them for b"", are dropped; the others come when it ends."""
    sys.stderr.flush()
    kept = os.dup(_STDERR)
    with nameless_file() as written:
        try:
            os.dup2(written.fileno(), _STDERR)
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, _STDERR)
            os.close(kept)
            written.seek(0)
            for line in written:
                if marker not in line:
                    os.write(_STDERR, line)
