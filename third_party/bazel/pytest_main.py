"""Runs pytest on a test target's runfiles, which hold its own test files and no others."""

import os
import sys

from third_party.bazel.launch import RUNFILES, launch

os.chdir(RUNFILES)
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
if "TEST_TMPDIR" in os.environ:
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = os.path.join(os.environ["TEST_TMPDIR"], "hypothesis")
launch("-m", "pytest", "-q", "-p", "no:cacheprovider", *sys.argv[1:])
