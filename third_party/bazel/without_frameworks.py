"""A pytest plugin: importing a deep-learning framework is an error, as it is where none is installed."""

import sys

for name in ("torch", "tensorflow", "jax"):
    sys.modules[name] = None
