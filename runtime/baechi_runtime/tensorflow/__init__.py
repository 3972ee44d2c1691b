"""TensorFlow's half of the runtime. Importing this package loads no TensorFlow; its modules do."""

import os

# Read when TensorFlow is loaded, so before any module of this package does that; what someone has set already stays.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
