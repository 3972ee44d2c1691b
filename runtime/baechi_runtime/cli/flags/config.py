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
from baechi_ext.ir.files import read_text, write_bytes
from baechi_ext.ir.made_by import MadeBy

FILE = "config.toml"
_INSTEAD = ({"num_devices", "num_gpus", "split_gpu"},)
"""Flags that say the same thing in several ways: one on the command line overrides all of them in the file."""
_SCRIPT = ("script", "script_args")
_NEAR = 0.75
"""The similarity (difflib's ratio) from which a flag is named as the nearest: a letter or two too many, missing or wrong."""
_MOST_BYTES = 256 * 1024
"""More than all flags and their values: a YAML file takes a second for each 100 KB."""
_MOST_LEVELS = 16
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?")


def add_flag(parser: argparse.ArgumentParser) -> None:
    """--config."""
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


def configured(args: argparse.Namespace, argv: Sequence[str]) -> argparse.Namespace:
    """The command line `argv` parsed again, with what the file of --config says where it says nothing; `args.given` is both together.

    Raises FileError for a file that can't be read, MissingBackendError for YAML without PyYAML, OptionError for what is not a flag, or no
    value of one.
    """
    parser, own = args.parser, args.given
    actions = _actions(parser)
    settings = _read(args.config)
    given = {actions[f"--{name}"].dest for name in own} | {name for name in _SCRIPT if getattr(args, name, None) is not None}
    given |= set(args.revoked)
    given |= {name for group in _INSTEAD if group & given for name in group}
    kept: dict[str, Any] = {}
    script: dict[str, Any] = {}
    for key, value in settings.items():
        name = str(key).replace("-", "_").lstrip("_")
        if name in _SCRIPT and hasattr(args, "script"):
            script |= {} if {name, "script"} & given else {name: _script(args.config, name, value)}
            continue
        action = actions.get(f"--{name}")
        if name in ("config", "help"):
            raise OptionError(f"{args.config}: {key!r} is for the command line alone; drop it")
        if action is None:
            raise OptionError(f"{args.config}: {key!r} is not a flag of {parser.prog}{_nearest(name, actions)}")
        if action.dest in given:
            continue
        parser.set_defaults(**{action.dest: _value(f"{args.config}: {key}", action, value)})
        kept[name] = value
    again: argparse.Namespace = parser.parse_args(argv)
    again.given = {k: v for k, v in (kept | own).items() if k != "config" and v is not False}
    for name in _SCRIPT:
        if hasattr(args, name):
            setattr(again, name, script.get(name, getattr(args, name)))
    return again


def keep(folder: Path, command: str, args: argparse.Namespace, made_by: MadeBy) -> None:
    """Writes the file that reproduces the run: every flag that was given. Raises FileError."""
    settings = dict(args.given)
    for name in _SCRIPT:
        if getattr(args, name, None):
            settings[name] = getattr(args, name)
    again = MadeBy(("baechi", command, f"--config={folder / FILE}"))
    lines = [f"# {made_by.programs}", f"# {made_by.command_line}", f"# again: {again.command_line}"]
    lines += [f"{name} = {_toml(value)}" for name, value in settings.items()]
    write_bytes(folder / FILE, ("\n".join(lines) + "\n").encode(errors="backslashreplace"))


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
    return f"; the nearest is {near[0]}" if near else "; baechi COMMAND --help lists them"


def _script(path: str, name: str, value: Any) -> Any:
    if name == "script" and isinstance(value, str):
        return value
    if name == "script_args" and isinstance(value, list):
        return list(map(str, value))
    raise OptionError(f"{path}: {name} is {value!r}; expected {'a path' if name == 'script' else 'a list of arguments'}")


def _value(what: str, action: argparse.Action, value: Any) -> Any:
    """Converts a value of the file as the flag would convert its text. Raises OptionError for a value that the flag does not take."""
    if action.nargs == 0 and action.default is argparse.SUPPRESS:  # refused: it says why
        try:
            action(argparse.ArgumentParser(), argparse.Namespace(), None, action.option_strings[0])
        except OptionError as e:
            raise OptionError(f"{what}: {e}") from e
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise OptionError(f"{what} is {value!r}; it is a switch: true or false")
        return value or action.default
    values = value if isinstance(value, list) else [value]
    texts = list(map(str, values))
    if any(isinstance(v, (bool, dict, list)) or v is None for v in values) or not texts:
        raise OptionError(f"{what} is {value!r}; expected a value as on the command line, or a list of such")
    try:
        convert = action.type or str
        return list(map(convert, texts)) if _is_repeated(action) else convert(",".join(texts))  # type: ignore[arg-type,operator]  # names of registered types, of which we have none
    except (argparse.ArgumentTypeError, ValueError, OptionError) as e:
        raise OptionError(f"{what}: {e}") from e


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if _NUMBER.fullmatch(text) else json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
