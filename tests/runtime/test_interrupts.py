"""Ctrl-C while packages are imported, in processes of their own: what is imported then is whole, unless Ctrl-C is pressed twice."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRESSES = """
import sys, time
from runtime.interrupts import wait_for_imports

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
