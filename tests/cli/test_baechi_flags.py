"""Baechi's flags on the command line: every one in the table is taken, or refused in one line that says what to do instead."""

import re
import shlex
from pathlib import Path

import pytest

from baechi_ext.errors import OptionError
from baechi_runtime.cli.flags.baechi import SWITCHES, TABLE, BaechiFlag, with_plain_switches
from baechi_runtime.cli.main import main, make_parser

TAKEN = [flag for flag in TABLE if flag.instead is None]
TEXT = (Path(__file__).parents[2] / "docs" / "baechi.md").read_text(encoding="utf-8")
REFUSED = [flag for flag in TABLE if flag.instead is not None]


def by_name(flag: BaechiFlag) -> str:
    return flag.name


def parse(*argv: str) -> dict[str, object]:
    """The parsed flags, without the parser itself, which is another one each time."""
    made = vars(make_parser().parse_args(["train", *with_plain_switches(argv)]))
    return {name: value for name, value in made.items() if name != "parser"}


def test_every_flag_stands_once() -> None:
    names = [flag.name for flag in TABLE]
    assert len(names) == len(set(names))
    assert len(TAKEN) >= 20
    assert len(REFUSED) >= 5


@pytest.mark.parametrize("flag", TAKEN, ids=by_name)
def test_taken(flag: BaechiFlag) -> None:
    without = parse()
    if flag.value is None:
        given = parse(f"--{flag.name}")
        assert parse(f"--{flag.name}=True") == given != without
        assert parse(f"--{flag.name}=false") == parse(f"--no{flag.name}") == without
    else:
        same_in_both = {"batch_size", "model_name", "learning_rate", "sct_threshold", "data_format"}  # may be the default here too
        given = parse(f"--{flag.name}={flag.value}")
        changed = {(name, value) for name, value in given.items() if value != without[name]}
        assert len(changed) == 1 or flag.name in same_in_both
        assert parse(f"--{flag.name}", flag.value) == parse(f"--{flag.name}={flag.value}")


@pytest.mark.parametrize("flag", REFUSED, ids=by_name)
def test_refused(flag: BaechiFlag, capsys: pytest.CaptureFixture[str]) -> None:
    spellings = [[f"--{flag.name}"], [f"--{flag.name}=True"]] if flag.value is None else [[f"--{flag.name}={flag.value}"]]
    for spelling in spellings:
        assert main(["train", "--model_name=wide_towers", *spelling]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == f"error: --{flag.name} is a flag of Baechi's that is not taken: {flag.instead}\n"
    if flag.value is None:  # what is not wanted need not be refused
        assert parse(f"--{flag.name}=False") == parse()


@pytest.mark.parametrize("flag", REFUSED, ids=by_name)
def test_what_replaces_a_refused_flag_is_there(flag: BaechiFlag, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["train", "--help"])
    shown = capsys.readouterr().out
    named = [word.strip(",;").split("=")[0] for word in flag.instead.split() if word.startswith("--")]
    assert named or "drop it" in flag.instead
    assert [name for name in named if name not in shown] == []
    assert f"--{flag.name} " not in shown


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (["--costgen"], ["--costgen"]),
        (["--costgen=True"], ["--costgen"]),
        (["--costgen=t", "--only_forward=1"], ["--costgen", "--only_forward"]),
        (["--costgen=False"], []),
        (["--costgen", "--costgen=F"], []),
        (["--costgen=0", "--costgen"], ["--costgen"]),
        (["--costgen=true", "--costgen=TRUE"], ["--costgen"]),
        (["--costgen", "--nocostgen"], []),
        (["--nonsense", "--seed=1", "--out=true"], ["--nonsense", "--seed=1", "--out=true"]),
        (["costgen=True", "--", "--costgen=True"], ["costgen=True", "--", "--costgen=True"]),
    ],
)
def test_switches_in_tensorflows_spelling(given: list[str], plain: list[str]) -> None:
    assert with_plain_switches(given) == plain


def test_a_switch_is_true_or_false() -> None:
    assert {"costgen", "residual", "grappler"} <= SWITCHES
    for value in ("", "2", "maybe"):
        with pytest.raises(OptionError, match=f"--costgen={value} is neither True nor False"):
            with_plain_switches([f"--costgen={value}"])


def test_images_are_channels_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data_format=NHWC"]) == 2
    assert "'NHWC' is not how the built-in models take images; drop the flag or give NCHW" in capsys.readouterr().err


# docs/baechi.md


def test_every_flag_is_in_the_documentation() -> None:
    tables = [line for line in TEXT.splitlines() if line.startswith("| `--")]
    named = set(re.findall(r"`--(\w+)`", "\n".join(line.split("|")[1] for line in tables)))
    assert named == {flag.name for flag in TABLE}


def test_the_documented_command_lines_are_taken() -> None:
    blocks = re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)
    programs = [shlex.split(block.replace("\\\n", " ")) for block in blocks]
    assert [program for program, *_ in programs] == ["./bazel-bin/train", "./bazel-bin/communication_benchmark", "./bazel-bin/train"]
    for _, *argv in (programs[0], programs[2]):
        args = parse(*argv)
        assert (args["model_name"], args["num_devices"], args["residual"], args["only_forward"]) == ("gnmt_v2", 4, True, True)
    probe = make_parser().parse_args(["probe-links", *programs[1][1:]])
    assert (probe.num_devices, probe.out) == (4, "/tmp/cluster.json")
