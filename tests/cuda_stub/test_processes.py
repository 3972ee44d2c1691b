"""A process for each of the pretended devices, which send each other their tensors over NCCL; besides tests/runtime/test_cuda_workers.py,
which runs on pretended devices as on others."""

import json
import subprocess
import sys

import pytest

from tests.cuda_stub.test_placed_steps import RNNLM
from tests.runtime.workers import ROOT, finish, start

PROGRAM = "from baechi_runtime.torch.processes.launch import run_workers; run_workers([], 2, module='tests.cuda_stub.sends')"
PLACED = f"train {RNNLM} --placement_method=contiguous --workers=process --num_gpus=4 --comm_cost_coeffs=1e-5,10 --json".split()


def test_the_host_receives_without_waiting_and_a_step_ends_when_what_it_sent_is_taken() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"taken by then": True, "values": [[2], [3]]}


@pytest.mark.parametrize("order", [{}, {"CUDA_STUB_ORDER": "1"}], ids=["at once", "in any order"])
def test_train(order: dict[str, str]) -> None:
    code, out, err = finish(start(*PLACED, **order))
    assert code == 0, err
    report = json.loads(out)
    assert (report["executor"], report["parity"]["passed"]) == ("cuda processes", True)
    assert report["transfers"] > 0
