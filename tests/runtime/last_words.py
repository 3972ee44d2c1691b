"""Workers one of which says why it fails, and then hangs until its alarm ends it; or, with `abort`, aborts as C++ code does.

    python -m tests.runtime.last_words [abort]
"""

import os
import signal
import sys
import time

if __name__ == "__main__":
    if os.environ["RANK"] == "1" and sys.argv[1:] == ["abort"]:
        sys.stderr.write("a warning\nterminate called after throwing an instance of 'X'\n  what():  the cause\n")
        sys.stderr.flush()
        os.abort()
    if os.environ["RANK"] == "1":
        sys.stderr.write("error: the cause\n")
        sys.stderr.flush()
        signal.alarm(1)
    time.sleep(60)
