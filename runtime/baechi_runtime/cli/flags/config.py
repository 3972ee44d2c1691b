"""`--config=FILE`: flags from a TOML or YAML file, which the command line's own override; and the file that reproduces a run.

A key is a flag's name: `num_devices = 2`. A switch is true or false; a flag that may be given several times takes a list, and so does one
whose value is a list with commas. `script` and `script_args` are a script and its arguments. A file's flags are read as the command line's.
"""

import argparse
import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baechi_ext.errors import FileError, MissingBackendError, OptionError
from baechi_ext.ir.files import read_text
from baechi_ext.ir.made_by import CONFIG, MadeBy

_ALTERNATIVES = (
    *({"num_devices", "num_gpus", "split_gpu"}, {"no_cache", "cache_dir"}),
    *({"strict", "fallback"}, {"cuda_graphs", "no_cuda_graphs"}),
)
"""Flags that say the same thing in several ways: one on the command line overrides all of them in the file."""
_NEAR = 0.75
"""The similarity (difflib's ratio) from which a flag is named as the nearest: a letter or two too many, missing or wrong."""
_MOST_BYTES = 256 * 1024
"""More than all flags and their values: a YAML file takes a second for each 100 KB."""
_MOST_LEVELS = 16
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?")


def add_flag(parser: argparse.ArgumentParser, *alternatives: set[str], without: Mapping[str, set[str]] | None = None) -> None:
    """--config, and flags of this command that say the same thing in several ways; and of some flags those `without` which they come."""
    parser.set_defaults(alternatives=(*_ALTERNATIVES, *alternatives), without=without or {})
    parser.add_argument(
        "--config", metavar="FILE", help="a TOML or YAML file of flags: a line NAME = VALUE each; flags on the command line override it"
    )


def given(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """The flags on a command line that `parser` took, by name: their text, True for a switch, a list for one that may be repeated."""
    found: dict[str, Any] = {}
    actions, words = _actions(parser), iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        action = actions.get(flag)
        if action is None or not flag.startswith("--"):
            continue
        text = True if action.nargs == 0 else value if equals else next(words, "")
        name = flag.removeprefix("--")
        found[name] = [*found.get(name, ()), text] if _is_repeated(action) else text
    return found


def words_of(args: argparse.Namespace) -> tuple[list[str], list[str] | None]:
    """The flags, and the script, in the file of --config as a command line has them, and the script's arguments; without what the command
    line itself says (`args.given`, `args.script`).

    Raises FileError for a file that can't be read, MissingBackendError for YAML without PyYAML, OptionError for what is not a flag, or no
    value of one.
    """
    parser, path = args.parser, args.config
    actions = _actions(parser)
    given = {actions[f"--{name}"].dest for name in args.given}
    given = given.union(*(flags for flags in args.alternatives if given & flags), *(args.without.get(flag, ()) for flag in given))
    has_script = getattr(args, "script", None) is not None
    words: list[str] = []
    arguments = None
    for key, value in _read(path).items():
        name = str(key).replace("-", "_").lstrip("_")
        action = actions.get(f"--{name}")
        if name == "script" and hasattr(args, "script"):
            if not isinstance(value, str):
                raise OptionError(f"{path}: {name} is {value!r}; expected a path")
            named = f"./{value}" if value.startswith("-") else value  # which the command line takes for a flag
            words = words if has_script else [named, *words]
        elif name == "script_args" and hasattr(args, "script"):
            if not isinstance(value, list):
                raise OptionError(f"{path}: {name} is {value!r}; expected a list of arguments")
            arguments = None if has_script else list(map(str, value))
        elif name in ("config", "help"):
            raise OptionError(f"{path}: {key!r} is for the command line alone; drop it")
        elif action is None:
            raise OptionError(f"{path}: {key!r} is not a flag of {parser.prog}{_nearest(name, actions)}")
        elif action.dest not in given:
            words += _words(f"{path}: {key}", name, action, value)
    return words, arguments


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, on the command line or in the file of --config, and the script with its arguments: for `text_of`."""
    script = {name: value for name in ("script", "script_args") if (value := getattr(args, name, None))}
    return {name: value for name, value in args.given.items() if name != "config"} | script


def text_of(folder: str, command: str, settings: Mapping[str, Any], made_by: MadeBy) -> str:
    """The text of the file, in the folder, that reproduces the run of a command: every flag that was given."""
    again = MadeBy(("baechi", command, f"--config={Path(folder) / CONFIG}"))
    lines = [f"# {made_by.programs}", f"# {made_by.command_line}", f"# again: {again.command_line}"]
    return "\n".join([*lines, *(f"{name} = {_toml(value)}" for name, value in settings.items()), ""])


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The parser's actions by flag; argparse has no public way to ask for them."""
    return parser._option_string_actions  # noqa: SLF001


def _is_repeated(action: argparse.Action) -> bool:
    return isinstance(action.default, list)


def _read(path: str) -> dict[str, Any]:
    """The settings in a file. Whatever can be read can be shown as well: no number is too long for that, no list too deep."""
    text = read_text(path, "config", _MOST_BYTES)
    is_yaml = Path(path).suffix in (".yaml", ".yml")
    kind, example = ("YAML", "num_devices: 2") if is_yaml else ("TOML", "num_devices = 2")
    try:
        found = _of_yaml(path, text) if is_yaml else tomllib.loads(text)
        repr(found)
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as e:  # PyYAML's own converters raise all of these
        raise FileError(f"config file {path!r} is not valid {kind}: {e}; write a line like {example} for each flag") from e
    if not isinstance(found, dict):
        raise FileError(f"config file {path!r} holds a {kind} {type(found).__name__}; write a line like {example} for each flag")
    return found


def _of_yaml(path: str, text: str) -> object:
    """The value of a YAML text. Raises MissingBackendError without PyYAML, ValueError for none, and for aliases, a few of which stand
    for more than fits into memory."""
    try:
        import yaml
    except ImportError as e:
        raise MissingBackendError(f"config file {path!r} needs PyYAML; pip install 'baechi-ext[yaml]', or write TOML") from e
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):  # PyYAML takes minutes for some thousand levels: it is stopped before
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_LEVELS or isinstance(event, yaml.AliasEvent):
                raise ValueError("aliases (*NAME) and lists in lists in lists are not read")
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as e:
        raise ValueError(str(e)) from e


def _nearest(name: str, actions: Mapping[str, argparse.Action]) -> str:
    near = difflib.get_close_matches(f"--{name}", actions, n=1, cutoff=_NEAR)
    return f"; the nearest is {near[0]}" if near else "; baechi COMMAND --help_all lists them"


def _words(what: str, name: str, action: argparse.Action, value: Any) -> list[str]:
    """A value of the file as the command line has it. Raises OptionError for what is no value of such a flag."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise OptionError(f"{what} is {value!r}; it is a switch: true or false")
        return [f"--{name}"] if value else []
    values = value if isinstance(value, list) else [value]
    if any(isinstance(v, (bool, dict, list)) or v is None for v in values) or not values:
        raise OptionError(f"{what} is {value!r}; expected a value as on the command line, or a list of such")
    texts = list(map(str, values)) if _is_repeated(action) else [",".join(map(str, values))]
    return [f"--{name}={text}" for text in texts]


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if _NUMBER.fullmatch(text) else json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
