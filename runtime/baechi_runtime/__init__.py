"""The half that does: profiles, applies and runs plans. baechi_ext decides and never imports this package."""

import os

# torch's profiler announces every start and stop on stderr unless told otherwise before torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
