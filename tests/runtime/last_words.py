"""Workers one of which says why it fails, and then hangs until its alarm ends it; or, with `abort`, aborts as C++ code does. With `babble`
all say more than a pipe holds, not all of it text, and end well, unless nobody reads that until their alarm.

    python -m tests.runtime.last_words [abort | babble]
    python -m tests.runtime.last_words children FOLDER CODE    each starts a process and notes its number there; all end with that code
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from baechi_runtime.host.error_line import error_line

BABBLE = ("x" * 79 + "\n") * 5000

if __name__ == "__main__":
    if sys.argv[1:] == ["babble"]:
        signal.alarm(10)
        os.write(2, b"caf\xe9\n")
        sys.stderr.write(BABBLE)
        sys.exit()
    if sys.argv[1:2] == ["children"]:
        folder, code = Path(sys.argv[2]), int(sys.argv[3])
        child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)  # it has this one's stderr, too
        (folder / os.environ["RANK"]).write_text(str(child.pid), encoding="ascii")
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        sys.exit(code)
    if os.environ["RANK"] == "1" and sys.argv[1:] == ["abort"]:
        sys.stderr.write("a warning\nterminate called after throwing an instance of 'X'\n  what():  the cause\n")
        sys.stderr.flush()
        os.abort()
    if os.environ["RANK"] == "1":
        sys.stderr.write(error_line("the cause"))
        sys.stderr.flush()
        signal.alarm(1)
    time.sleep(60)
