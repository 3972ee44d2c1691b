"""Baechi's flags on the command line: every one is taken, or refused in one line that says what to do instead."""

import re
import shlex
from pathlib import Path

import pytest

from baechi_ext.errors import OptionError
from baechi_runtime.cli.flags.baechi import REFUSED, SWITCHES, with_plain_switches
from baechi_runtime.cli.main import main, make_parser

VALUES = {
    "model_name": "inception_v3",
    "batch_size": "32",
    "optimizer": "adam",
    "learning_rate": "0.01",
    "num_gpus": "4",
    "cost_path": "cost.pkl",
    "memory_fraction": "0.9",
    "comm_cost_coeffs": "0.0001754,134",
    "placement_method": "m_etf",
    "placer_type": "fusion",
    "grouper": "coplace",
    "sct_threshold": "0.1",
    "comm_cost_factor": "1.5",
    "cost_factor": "1.5",
    "placer_memory_fraction": "0.9",
    "adjustment_method": "memory_sum",
    "data_format": "NCHW",
    "logdir": "runs",
    "vocab_size": "5000",
    "max_seq_length": "30",
    "rnn_units": "1024",
    "num_layers": "2",
    "rnn_unit_type": "lstm",
    "encoder_type": "gnmt",
    "grappler_time": "3600",
    "stats_path": "stats.log",
    "device_info_path": "devices.json",
}
"""Baechi's flags that are no switches, with a value that each takes."""
ALL = sorted({*VALUES, *SWITCHES})
TAKEN = [name for name in ALL if name not in REFUSED]
TEXT = (Path(__file__).parents[2] / "docs" / "baechi.md").read_text(encoding="utf-8")


def parse(*argv: str) -> dict[str, object]:
    """The parsed flags, without the parser itself, which is another one each time."""
    made = vars(make_parser().parse_args(["train", *with_plain_switches(argv)]))
    return {name: value for name, value in made.items() if name != "parser"}


def test_there_are_flags_of_both_kinds() -> None:
    assert not SWITCHES & set(VALUES)
    assert (len(TAKEN), len(REFUSED)) == (36, 6)


@pytest.mark.parametrize("flag", TAKEN)
def test_taken(flag: str) -> None:
    without = parse()
    if flag in SWITCHES:
        given = parse(f"--{flag}")
        assert parse(f"--{flag}=True") == given != without
        assert parse(f"--{flag}=false") == parse(f"--no{flag}") == without
    else:
        same_in_both = {"batch_size", "model_name", "learning_rate", "sct_threshold", "data_format"}  # may be the default here too
        given = parse(f"--{flag}={VALUES[flag]}")
        changed = {(name, value) for name, value in given.items() if value != without[name]}
        assert len(changed) == 1 or flag in same_in_both
        assert parse(f"--{flag}", VALUES[flag]) == parse(f"--{flag}={VALUES[flag]}")


@pytest.mark.parametrize("flag", REFUSED)
def test_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    spellings = [[f"--{flag}"], [f"--{flag}=True"]] if flag in SWITCHES else [[f"--{flag}={VALUES[flag]}"]]
    for spelling in spellings:
        assert main(["train", "--model_name=wide_towers", *spelling]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == f"error: --{flag} is a flag of Baechi's that is not taken: {REFUSED[flag]}\n"
    if flag in SWITCHES:  # what is not wanted need not be refused
        assert parse(f"--{flag}=False") == parse()


@pytest.mark.parametrize("flag", REFUSED)
def test_what_replaces_a_refused_flag_is_there(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["train", "--help_all"])
    shown = capsys.readouterr().out
    named = [word.strip(",;").split("=")[0] for word in REFUSED[flag].split() if word.startswith("--")]
    assert named or "drop it" in REFUSED[flag]
    assert [name for name in named if name not in shown] == []
    assert f"--{flag} " not in shown


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
    assert named == set(ALL)


def test_the_documented_command_lines_are_taken() -> None:
    blocks = re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)
    programs = [shlex.split(block.replace("\\\n", " ")) for block in blocks]
    assert [program for program, *_ in programs] == ["./bazel-bin/train", "./bazel-bin/communication_benchmark", "./bazel-bin/train"]
    for _, *argv in (programs[0], programs[2]):
        args = parse(*argv)
        assert (args["model_name"], args["num_devices"], args["residual"], args["only_forward"]) == ("gnmt_v2", 4, True, True)
    probe = make_parser().parse_args(["probe-links", *programs[1][1:]])
    assert (probe.num_devices, probe.out) == (4, "/tmp/cluster.json")
