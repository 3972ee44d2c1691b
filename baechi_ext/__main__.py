"""`python -m baechi_ext` is `baechi`."""

import sys


def main() -> int:
    """The command's exit code."""
    from baechi_runtime.__main__ import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
