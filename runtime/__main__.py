"""`python -m runtime` is `baechi`."""

import sys

from runtime.cli import main

sys.exit(main())
