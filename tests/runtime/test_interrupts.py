"""Ctrl-C while packages are imported, guards checked or objects destroyed, in processes of their own: it is neither lost nor leaves half a
package."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime import forked

ROOT = Path(__file__).parents[2]
PRESSES = """
import sys, time
from baechi_runtime.host.interrupts import wait_for_imports

presses = int(sys.argv[1])

def go_on():
    \"\"\"As torch's extension does when numpy's import fails.\"\"\"
    try:
        import pressed
    except BaseException as e:
        print("swallowed", type(e).__name__, flush=True)

wait_for_imports()
try:
    go_on()
    print("half" if not hasattr(sys.modules.get("pressed"), "last") else "whole", flush=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.01)
    print("lost")
except KeyboardInterrupt:
    print("interrupted")
"""
PRESSED = """
import signal, sys
for _ in range(int(sys.argv[1])):
    signal.raise_signal(signal.SIGINT)
import time
time.sleep(0.3)  # looked at again, several times
last = 1
"""


@pytest.mark.parametrize(
    ("folder", "presses", "said"),
    [
        ("lib/site-packages", 1, ["whole", "interrupted"]),
        ("lib/site-packages", 2, ["swallowed KeyboardInterrupt", "half"]),
        ("project", 1, ["swallowed KeyboardInterrupt", "half"]),
    ],
)
def test_an_import_ends_first_unless_it_is_of_a_script_or_pressed_twice(tmp_path: Path, folder: str, presses: int, said: list[str]) -> None:
    package = tmp_path / folder
    package.mkdir(parents=True)
    (package / "pressed.py").write_text(PRESSED)
    program = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(package)!r}]\n{PRESSES}"
    with subprocess.Popen([sys.executable, "-c", program, str(presses)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline().strip() for _ in said]
        process.kill()
    assert seen == said


DROPPED = """
import signal, sys, time, weakref
from baechi_runtime.host.interrupts import wait_for_imports

class Pressing:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

class Failing:
    def __del__(self):
        raise ValueError("said as ever")

wait_for_imports()
try:
    Failing()
    if sys.argv[1] == "destructor":
        Pressing()
    else:
        seen = Failing()
        kept = weakref.ref(seen, lambda _: signal.raise_signal(signal.SIGINT))
        del seen
    print("goes on", flush=True)
    time.sleep(20)
    print("lost")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("where", ["destructor", "callback"])
def test_where_python_drops_an_exception_it_is_pressed_again(where: str) -> None:
    done = subprocess.run([sys.executable, "-c", DROPPED, where], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n") == ["goes on", "interrupted", ""]
    assert "said as ever" in done.stderr
    assert "KeyboardInterrupt" not in done.stderr


GUARDED = """
import signal, sys
from collections import OrderedDict
from torch import nn
import torch

class Pressing(OrderedDict):
    \"\"\"Ctrl-C while its length is asked for, as a guard does.\"\"\"
    presses = 0
    def __len__(self):
        if Pressing.presses:
            Pressing.presses -= 1
            signal.raise_signal(signal.SIGINT)
        return super().__len__()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
model._forward_hooks = Pressing()
for step in range(400):
    if step == 20:
        Pressing.presses = 1
    model(torch.randn(16, 64)).square().mean().backward()
print("lost", Pressing.presses)
"""


def test_an_interrupt_in_a_guard_is_not_lost(tmp_path: Path) -> None:
    """TorchDynamo takes any error in a guard for a guard that does not hold, and traces once more."""
    script = tmp_path / "train.py"
    script.write_text(GUARDED)
    done = forked.run("train", "--placement_method=random", "--num_devices=2", "--keep_placed", str(script))
    assert (done.returncode, done.stdout) == (130, ""), done.stderr
    assert "steps placed" in done.stderr
