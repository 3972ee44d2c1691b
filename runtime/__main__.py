"""`python -m runtime` is `baechi`, and this is where both begin."""

import sys


def main() -> int:
    """The command's exit code. Ctrl-C is answered from the first moment on: what the command needs takes its time to be imported."""
    try:
        from runtime.cli import main as command
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())
