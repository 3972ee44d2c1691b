"""Workers each of which writes the order of a set of words into a file of the folder given; rank 0 waits for all.

    python -m tests.runtime.set_order FOLDER
"""

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    Path(folder, os.environ["RANK"]).write_text(" ".join({"the", "quick", "brown", "fox", "jumps", "over", "dog"}), encoding="utf-8")
    while os.environ["RANK"] == "0" and len(list(folder.iterdir())) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
