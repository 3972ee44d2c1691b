"""Signs of life end before python does, which would abort a thread that is in the store."""

import subprocess
import sys

PROGRAM = """
import threading
from datetime import timedelta
import torch.distributed as dist
from baechi_runtime.torch.processes import heartbeat

heartbeat._BEAT_SECONDS = 0.0  # in the store nearly all the time
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
ends = heartbeat.give(store), heartbeat.listen(store, 60.0)
while not store.check(["sign of life"]):
    pass
for end in ends:
    end()
assert [thread for thread in threading.enumerate() if thread.name.startswith("baechi")] == []
"""


LEFT = """
import time
from datetime import timedelta
import torch.distributed as dist
from baechi_runtime.torch.processes import heartbeat

heartbeat._BEAT_SECONDS = 0.05
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
end, enough = heartbeat.listen(store, 1.0), heartbeat.give(store)
time.sleep(0.5)
heartbeat.leave(store)
enough()
time.sleep(3.0)
end()
"""


def test_a_process_may_take_longer_than_one_that_has_left() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_leaves_in_peace() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
