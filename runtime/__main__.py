"""`python -m runtime` is `baechi`, and this is where both begin."""

import sys

from runtime.interrupts import wait_for_imports


def main() -> int:
    """The command's exit code. Ctrl-C is answered from the first moment on: what the command needs takes its time to be imported."""
    try:
        wait_for_imports()
        from runtime.cli import main as command

        return command()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
