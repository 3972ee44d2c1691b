"""`python -m baechi_ext` is `baechi`, and this is where both begin."""

import os
import sys
from io import TextIOWrapper

from baechi_ext.collector import importing
from baechi_runtime.host.error_line import error_line
from baechi_runtime.host.interrupts import exit_code, wait_for_imports


def main() -> int:
    """The command's exit code. Ctrl-C is answered from the first moment on: what the command needs takes its time to be imported."""
    _open_streams()
    try:
        wait_for_imports()
        with importing():
            from baechi_runtime.cli.main import main as command
        return command()
    except KeyboardInterrupt:
        sys.stderr.write(error_line("interrupted"))
        return exit_code()


def _open_streams() -> None:
    """Opens /dev/null for stdin, stdout and stderr where whoever started the command has closed them: else a run would end at the first
    line that it says there, and its first files would be taken for them. What stdout's encoding has no letters for is escaped, as
    Python does it on stderr."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
