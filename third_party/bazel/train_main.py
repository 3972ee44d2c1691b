"""bazel-bin/train FLAGS is `baechi train FLAGS`."""

import sys

from third_party.bazel.launch import launch

launch("-m", "baechi_runtime.__main__", "train", *sys.argv[1:])
