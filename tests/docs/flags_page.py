"""docs/flags.md, made from the parser: every flag of every command, as `--help` says it.

    python -m tests.docs.flags_page > docs/flags.md
"""

import argparse
from collections.abc import Iterator

from baechi_runtime.cli.main import make_parser

HEAD = """# Flags

What `baechi COMMAND --help` says, `--help_all` of `place`, `train` and `compare`, on one page; `-` and `_` are the same in a
flag's name. Flags of these three can also stand in a file that `--config` names ([files.md](files.md#config)).

Every command also takes `-q` (`--quiet`: nothing on stderr of what is being done) and `-v` (`--verbose`: line by line, with the
seconds that each took, and the traceback of an error).
"""


_EVERYWHERE = ("help", "quiet", "verbose")


def rendered() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_of_parser(make_parser())])


def _of_parser(parser: argparse.ArgumentParser) -> Iterator[str]:
    commands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not commands:
        yield f"## `{parser.prog}`\n\n{_sentence(parser.description or '')}\n"
        yield from _tables(parser)
    for action in commands:
        for sub in dict.fromkeys(action.choices.values()):
            yield from _of_parser(sub)


def _tables(parser: argparse.ArgumentParser) -> Iterator[str]:
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.dest not in _EVERYWHERE and action.help is not argparse.SUPPRESS]
        title = "" if group.title in ("options", "positional arguments") else _capital(group.title or "")
        if shown:
            yield "\n".join([f"| {title} | |", "|---|---|", *(_row(parser, action) for action in shown)]) + "\n"


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar or ())
    name = f"{'` `'.join(action.option_strings)} {metavar}".strip() or action.dest
    text = parser._get_formatter()._expand_help(action)
    for plain, escaped in (("|", "\\|"), ("*", "\\*"), ("<", "&lt;"), ("\n", "<br>")):
        text = text.replace(plain, escaped)
    return f"| `{name}` | {text} |"


def _sentence(text: str) -> str:
    return _capital(text) + "." * (not text.endswith("."))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


if __name__ == "__main__":
    print(rendered(), end="")
