"""`baechi` in a worker of torchrun's that takes itself for the only one of its machine."""

import os
import sys

from baechi_runtime.cli.main import main

if __name__ == "__main__":
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    sys.exit(main(sys.argv[1:]))
