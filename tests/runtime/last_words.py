"""Workers one of which says why it fails, and then hangs until its alarm ends it.

    python -m tests.runtime.last_words
"""

import os
import signal
import sys
import time

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        sys.stderr.write("error: the cause\n")
        sys.stderr.flush()
        signal.alarm(1)
    time.sleep(60)
