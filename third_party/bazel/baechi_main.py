"""bazel-bin/baechi ARGUMENTS is `baechi ARGUMENTS`."""

import sys

from third_party.bazel.launch import launch

launch("-m", "baechi_runtime.__main__", *sys.argv[1:])
