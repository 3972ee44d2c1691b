"""Scripts whose steps can't be placed, and what they come to by `baechi train SCRIPT`: one line that says what to change, exit code 1."""

import re
import textwrap
from pathlib import Path

import pytest

from baechi_runtime.cli.main import main
from tests.processes import ended
from tests.runtime.forked import start
from tests.runtime.workers import finish, only_error

SCRIPT = """
import os, signal, tempfile
import numpy as np
import tensorflow as tf
import baechi_ext

weight = tf.Variable(tf.ones((40, 40)), name="weight")
seen, count = [], 0
writer = tf.summary.create_file_writer(tempfile.mkdtemp())

{decorator}
def step(x):
    {body}

for number in range(4):
    step(tf.ones((40, 40)))
print("done")
"""
ORDINARY = "@tf.function"
TRAIN = ("train", "--framework=tensorflow")
PLACED = '@baechi_ext.parallelize(method="m_topo", framework="tensorflow", keep_placed=True)'
UPDATE = "weight.assign_sub(0.1 * x)\n"


def script(folder: Path, body: str, decorator: str) -> str:
    path = folder / "script.py"
    path.write_text(SCRIPT.format(decorator=decorator, body=textwrap.indent(body, "    ").lstrip()))
    return str(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("decorator", "body", "said"),
    [
        (PLACED, "tf.square(x)", "the training step step returns no tensor and changes no variable, so there is nothing to compare"),
        (PLACED, UPDATE + "seen.append(1)\nreturn x", "changes the Python variable 'seen' (0 entries before it was traced"),
        (PLACED, "global count\ncount += 1\n" + UPDATE + "return x", "changes the Python variable 'count' (0 before it was traced, 1"),
        (ORDINARY, UPDATE + "tf.print(x)\nreturn x", "it works on text (StringFormat)"),
        (ORDINARY, UPDATE + "return tf.strings.length(tf.strings.as_string(x))", "it works on text (AsString)"),
        (PLACED, UPDATE + "with writer.as_default(step=0):\n    tf.summary.scalar('x', x[0, 0])\nreturn x", "it writes a summary"),
        (ORDINARY, UPDATE + "return tf.numpy_function(np.sin, [x], tf.float32)", "it runs Python code"),
        (PLACED, UPDATE + "return x * tf.Variable(3.0)", "the step makes a variable: make it once, before the step"),
        (PLACED, UPDATE + "return tf.raw_ops.NcclBroadcast(input=x, shape=[40, 40]) + 1.0", "NcclBroadcast has no kernel for a CPU"),
        (PLACED, UPDATE + "return x * x.numpy()", "a tensor of the step has no NumPy value"),
    ],
)
def test_what_cannot_be_placed_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], decorator: str, body: str, said: str
) -> None:
    code = main([*TRAIN, "--strict", "--keep_placed", "--placement_method=m_topo", script(tmp_path, body, decorator)])
    out, err = capsys.readouterr()
    assert (code, out) == (1, ""), err
    assert said in only_error(err)


@pytest.mark.filterwarnings("ignore")
def test_a_function_with_more_than_variables_runs_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = UPDATE + "with writer.as_default(step=0):\n    tf.summary.scalar('x', x[0, 0])\nreturn x"
    code = main([*TRAIN, script(tmp_path, body, ORDINARY)])
    out, err = capsys.readouterr()
    assert (code, out) == (0, "done\n"), err
    said = r"baechi: step: not placed; op '\S+' can't be placed: it writes a summary, at \S+:\d+ in step: `tf.summary.scalar"
    assert re.search(said, err), err


def test_an_unknown_batch_size_is_that_of_the_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decorator = "@tf.function(input_signature=[tf.TensorSpec((None, 40))])"
    body = UPDATE + "return tf.reduce_sum(weight)"
    code = main([*TRAIN, "--workers=thread", "--keep_placed", "--placement_method=m_topo", script(tmp_path, body, decorator)])
    out, err = capsys.readouterr()
    assert (code, out) == (0, "done\n"), err
    assert "3 steps placed" in err


KILLS = UPDATE + "return tf.reduce_sum(weight)\n"
AFTER = """
    if number == 2:
        from baechi_runtime.tensorflow.calls import placing
        (devices, _), = placing._devices.values()
        print(*(s.process.pid for s in devices.servers), flush=True)
        os.kill(devices.servers[1].process.pid, signal.SIGKILL)
"""


def test_a_server_dies_in_a_script(tmp_path: Path) -> None:
    path = Path(script(tmp_path, KILLS, ORDINARY))
    path.write_text(path.read_text().replace('print("done")', AFTER.strip("\n") + '\nprint("done")'))
    flags = ("--framework=tensorflow", "--placement_method=round_robin", "--comm_cost_coeffs=0.001,50", "--timeout=60")
    code, out, err = finish(start("train", *flags, str(path)))
    assert code == 1, err
    assert "the server of device 1 " in only_error(err)
    assert re.search(r"was killed by SIGKILL \(its part of the plan takes \d+ bytes\); check", only_error(err))
    pids = [int(pid) for pid in out.split()]
    assert len(pids) == 2
    assert ended(pids)
