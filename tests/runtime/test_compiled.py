"""The unplaced step under torch.compile: it computes the step, is measured beside plans, and what can't be compiled is said."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baechi_ext.errors import ExecutionError
from baechi_runtime.models.registry import ModelOptions, make_step
from baechi_runtime.models.training_step import optimizer_spec
from baechi_runtime.torch.compiled import compiled_step
from baechi_runtime.torch.lowering.devices import cpu_devices
from baechi_runtime.torch.threads.executor import ThreadExecutor

TINY = ModelOptions(batch_size=2, max_seq_length=4, num_layers=1, d_model=8, num_heads=2, vocab_size=11, dropout=0.0)
"""As tests/cli/test_compare.py has it: what is compiled there need not be compiled again."""
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile calls a compiler of C++")


@needs_compiler
def test_the_compiled_step_computes_the_step_and_leaves_it_as_it_was() -> None:
    step = make_step("gpt2", TINY, optimizer_spec("adam", 0.01))
    before, random = step.snapshot(), torch.get_rng_state()
    with ThreadExecutor(cpu_devices(1), timeout_seconds=60) as executor:
        compiled, parity, note = compiled_step(executor, step, draws=False)
        assert (parity.passed, parity.compared) == (True, 1 + 2 * len(list(step.module.parameters())))
        assert note.startswith("torch.compile took ")
        assert all(torch.equal(value, before[name]) for name, value in step.state().items())
        assert torch.equal(torch.get_rng_state(), random)
        assert compiled.run()[1].wall_us > 0
        assert any(not torch.equal(value, before[name]) for name, value in step.state().items())
        step.restore(before)
        compiled, parity, note = compiled_step(executor, step, draws=True)
    assert (parity, note.partition("; ")[2]) == (None, "its step draws other random numbers, so its results are not compared")


def test_what_cannot_be_compiled_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATH", "TORCHINDUCTOR_CACHE_DIR"):  # no compiler, and nothing that one has made
        monkeypatch.setenv(name, str(tmp_path))
    step = make_step("gpt2", replace(TINY, max_seq_length=5), optimizer_spec("sgd", 0.01))
    refused = r"torch\.compile can't take the step: \w+: .*(g\+\+|C\+\+)"
    with ThreadExecutor(cpu_devices(1), timeout_seconds=60) as executor, pytest.raises(ExecutionError, match=refused):
        compiled_step(executor, step, draws=False)
