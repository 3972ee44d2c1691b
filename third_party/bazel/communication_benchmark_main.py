"""bazel-bin/communication_benchmark FLAGS is `baechi probe-links FLAGS`."""

import sys

from third_party.bazel.launch import launch

launch("-m", "baechi_runtime.__main__", "probe-links", *sys.argv[1:])
