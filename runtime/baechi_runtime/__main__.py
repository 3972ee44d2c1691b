"""`python -m baechi_ext` is `baechi`, and this is where both begin."""

import sys

from baechi_ext.collector import importing
from baechi_runtime.host.interrupts import exit_code, wait_for_imports


def main() -> int:
    """The command's exit code. Ctrl-C is answered from the first moment on: what the command needs takes its time to be imported."""
    try:
        wait_for_imports()
        with importing():
            from baechi_runtime.cli.main import main as command
        return command()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        return exit_code()


if __name__ == "__main__":
    sys.exit(main())
