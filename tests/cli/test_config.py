"""`--config=FILE`: a file's flags are read as the command line's, which override them, and every run keeps a file that repeats it."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.errors import BaechiError
from baechi_ext.ir.made_by import CONFIG, MadeBy
from baechi_runtime.cli.flags import config
from baechi_runtime.cli.main import parsed

IGNORED = {"config", "given", "command", "parser"}
Run = Callable[..., tuple[int, str, str]]


def asked(*line: object) -> dict[str, object]:
    """The values that a command line asks for, by flag."""
    return {name: value for name, value in vars(parsed([str(word) for word in line])).items() if name not in IGNORED}


def file_of(folder: Path, text: str, name: str = "run.toml") -> Path:
    (folder / name).write_text(text)
    return folder / name


FLAGS = {
    "--model_name": "wide_towers",
    "--num-gpus": "4",
    "--batch_size": "8",
    "--learning_rate": "0.5",
    "--device_memory": "16GiB",
    "--comm_cost_coeffs": "0.0001754,134",
    "--pin": "encoder.*=0",
}


def test_a_file_says_what_flags_say(tmp_path: Path) -> None:
    toml = """
    model_name = "wide_towers"
    num-gpus = 4
    batch_size = 8
    learning_rate = 0.5
    device_memory = "16GiB"
    comm_cost_coeffs = [0.0001754, 134]
    pin = ["encoder.*=0", "head=1"]
    residual = true
    costgen = false
    """
    line = [f"{name}={value}" for name, value in FLAGS.items()]
    expected = asked("train", *line, "--pin=head=1", "--residual")
    assert asked("train", f"--config={file_of(tmp_path, toml)}") == expected
    yaml = "\n".join(line.strip().replace(" = ", ": ") for line in toml.splitlines())
    assert asked("train", "--config", file_of(tmp_path, yaml, "run.yaml")) == expected


@pytest.mark.parametrize(
    ("own", "toml"),
    [
        (["--batch_size=2"], "batch_size = 8"),
        (["--batch-size", "2"], "batch-size = 8"),
        (["--pin=a=0"], 'pin = ["b=1"]'),
        (["--num_gpus=2"], "num_devices = 4"),
        (["--num_devices=2"], "split_gpu = 4"),
        (["--logdir=here"], 'out = "there"'),
        (["--nocostgen"], "costgen = true"),
        (["--costgen=False"], "costgen = true"),
        (["mine.py", "--", "--lr", "1"], 'script = "theirs.py"\nscript_args = ["--lr", "2"]'),
    ],
)
def test_flags_override_the_file(tmp_path: Path, own: list[str], toml: str) -> None:
    assert asked("train", f"--config={file_of(tmp_path, toml)}", *own) == asked("train", *own)


def test_a_script_and_its_arguments(tmp_path: Path) -> None:
    path = file_of(tmp_path, 'script = "mine.py"\nscript_args = ["--epochs", 3]\nnum_devices = 3')
    assert asked("train", f"--config={path}") == asked("train", "--num_devices=3", "mine.py", "--", "--epochs", "3")
    assert asked("-q", "train", f"--config={path}") == asked("train", "-q", "--num_devices=3", "mine.py", "--", "--epochs", "3")


@pytest.mark.parametrize(
    ("command", "toml", "message"),
    [
        ("train", "num_device = 2", "'num_device' is not a flag of baechi train; the nearest is --num_devices"),
        ("place g.json", "batch_size = 2", "'batch_size' is not a flag of baechi place"),
        ("compare", 'placement_method = "m_etf"', "the nearest is --placement_methods"),
        ("train", "qqqqqq = 2", "baechi COMMAND --help_all lists them"),
        ("train", 'config = "other.toml"', "'config' is for the command line alone; drop it"),
        ("train", "batch_size = 0", "batch_size: '0' is not a whole number of at least 1"),
        ("train", "batch_size = true", "batch_size is True; expected a value"),
        ("train", "residual = 1", "residual is 1; it is a switch: true or false"),
        ("train", "[devices]\nnum_devices = 2", "'devices' is not a flag of baechi train; the nearest is --num_devices"),
        ("train", "grappler = true", "--grappler is a flag of Baechi's that is not taken: choose a search with --placement_method"),
        ("train", 'script_args = "x"', "script_args is 'x'; expected a list of arguments"),
        ("train", "batch_size =", "is not valid TOML"),
        ("train", "nosuch_key = 2", "'nosuch_key' is not a flag of baechi train; baechi COMMAND --help_all lists them"),
        ("place g.json", 'pin = ["a=0", "b"]', "pin: 'b' is not a pin; write PATTERN=DEVICE"),
    ],
)
def test_what_is_wrong_is_named(run: Run, tmp_path: Path, command: str, toml: str, message: str) -> None:
    path = file_of(tmp_path, toml)
    code, out, err = run(*command.split(), f"--config={path}")
    assert (code, out) == (1 if "valid" in message else 2, "")
    assert message in err
    assert str(path) in err


@pytest.mark.parametrize(
    ("command", "toml", "flag", "gone"),
    [
        ("place g.json", "num_devices = 2", "--cluster=c.json", {"num_devices"}),
        ("place g.json", 'cluster = "c.json"\ncomm_cost_coeffs = "1,2"', "--num_devices=2", {"cluster"}),
        ("train", 'cluster = "c.json"\nnum_devices = 2', "--comm_cost_coeffs=1,2", {"cluster"}),
        ("train", 'comm_cost_coeffs = "1,2"\ndevice_speeds = 1', "--cluster=c.json", {"comm_cost_coeffs", "device_speeds"}),
        ("train s.py", "no_cache = true", "--cache_dir=c", {"no_cache"}),
        ("train", "cuda_graphs = true", "--no_cuda_graphs", {"cuda_graphs"}),
        ("train", "num_steps = 5\nbatch_size = 2", "--train_steps=9", {"num_steps"}),
        ("train", "train_steps = 9\nbatch_size = 2", "--num_steps=5", set()),
    ],
)
def test_what_says_it_otherwise_is_overridden(tmp_path: Path, command: str, toml: str, flag: str, gone: set[str]) -> None:
    flags = {line.partition(" ")[0] for line in toml.splitlines()}
    found = parsed([*command.split(), f"--config={file_of(tmp_path, toml)}", flag]).given
    assert set(found) == {"config", flag.removeprefix("--").partition("=")[0]} | flags - gone


@pytest.mark.parametrize(("text", "message"), [("a: [", "is not valid YAML"), ("- a", "holds a YAML list"), ("", None)])
def test_yaml_that_is_none(tmp_path: Path, text: str, message: str | None) -> None:
    path = file_of(tmp_path, text, "run.yml")
    if message is None:
        assert asked("train", f"--config={path}") == asked("train")
        return
    with pytest.raises(BaechiError, match=message):
        asked("train", f"--config={path}")


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.yaml", BOMB, r"is not valid YAML: aliases \(\*NAME\) and lists in lists in lists are not read"),
        ("run.yaml", "seed: " + "[" * 200_000, "is not valid YAML: aliases .* and lists in lists in lists are not read"),
        ("run.yaml", "seed: " + "[" * 2000 + "]" * 2000, "is not valid YAML"),
        ("run.yaml", "seed: " + "1" * 5000, "is not valid YAML: Exceeds the limit"),
        ("run.yaml", "seed: 0x" + "f" * 5000, "is not valid YAML: Exceeds the limit"),
        ("run.yaml", "seed: 2001-99-99", "is not valid YAML: month must be in"),
        ("run.yaml", "seed: !!int ''", "is not valid YAML"),
        ("run.yaml", "seed: !!timestamp x", "is not valid YAML"),
        ("run.toml", "seed = " + "[" * 2000, "is not valid TOML"),
        ("run.toml", "seed = " + "1" * 5000, "is not valid TOML: Exceeds the limit"),
        ("run.toml", "seed = 0x" + "f" * 5000, "is not valid TOML: Exceeds the limit"),
        ("run.toml", "#" * 300_000, "holds more than 262144 bytes"),
    ],
)
def test_what_no_flag_needs_is_refused(run: Run, tmp_path: Path, name: str, text: str, message: str) -> None:
    code, out, err = run("train", f"--config={file_of(tmp_path, text, name)}")
    assert (code, out, err.count("\n"), len(err) < 2000) == (1, "", 1, True)
    assert re.search(message, err)


def test_devices_and_endless_pipes_are_no_config(run: Run) -> None:
    code, _, err = run("train", "--config=/dev/zero")
    assert (code, "cannot read config file '/dev/zero': it is a device" in err) == (1, True)


def test_a_long_value_is_cut_and_its_control_characters_are_shown(run: Run, tmp_path: Path) -> None:
    key = "x" * 3000 + r"\u001b[31m"
    code, _, err = run("train", f"--config={file_of(tmp_path, f'{chr(34)}{key}{chr(34)} = 1')}")
    assert (code, len(err) < 700, "\x1b" in err) == (2, True, False)
    assert "is not a flag of baechi train; baechi COMMAND --help_all lists them" in err


def test_without_pyyaml_only_yaml_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    code, _, err = run("train", f"--config={file_of(tmp_path, 'seed: 1', 'run.yaml')}")
    assert (code, "pip install 'baechi-ext[yaml]'" in err) == (1, True)
    assert asked("train", f"--config={file_of(tmp_path, 'seed = 1')}") == asked("train", "--seed=1")


def test_a_missing_file_is_named(run: Run) -> None:
    code, _, err = run("place", "g.json", "--config=/nowhere/run.toml")
    assert (code, "cannot read config file '/nowhere/run.toml'" in err) == (1, True)


LINES = [
    ["--model_name=gnmt_v2", "--residual", "--pin=a=0", "--pin", "b c=1", "--comm_cost_coeffs=0.1,2", "--out=o", "--time_limit", "1e1"],
    ["--config=FILE", "--batch_size=4", "--costgen"],
    ["my script.py", "--placement_method=m_sct", "--", "--lr", "0.1", "two words", '"quoted" \\ \n\x7fé'],
]


@pytest.mark.parametrize("line", LINES, ids=["flags", "a file and flags", "a script"])
def test_what_a_run_keeps_repeats_it(tmp_path: Path, line: list[str]) -> None:
    source = file_of(tmp_path, 'model_name = "nasnet"\nbatch_size = 2\nresidual = false\nlogdir = "x"', "source.toml")
    args = parsed(["train", *(word.replace("FILE", str(source)) for word in line)])
    made_by = MadeBy(args.command, {"baechi": "1", "python": "3"})
    (tmp_path / CONFIG).write_text(config.text_of(str(tmp_path), "train", config.settings(args), made_by), encoding="utf-8")
    again = asked("train", f"--config={tmp_path / 'config.toml'}")
    assert again == {name: value for name, value in vars(args).items() if name not in IGNORED}
    assert (tmp_path / "config.toml").read_text().startswith("# baechi 1, Python 3\n# baechi train ")


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    import tomllib

    try:
        text.encode()
    except UnicodeEncodeError:
        return
    read = tomllib.loads(f"a = {config._toml(text)}")["a"]
    assert str(read) == text


def test_place_reads_its_flags_from_a_file(run: Run, graph: Path, tmp_path: Path) -> None:
    path = file_of(tmp_path, f'num_devices = 2\nplacement_method = "single"\nout = {json.dumps(str(tmp_path / "p.json"))}\njson = true')
    code, out, err = run("place", graph, f"--config={path}")
    assert (code, json.loads(out)["method"]) == (0, "single"), err
    assert json.loads((tmp_path / "p.json").read_text())["placement"] == {"a": 0, "b": 0, "c": 0}
