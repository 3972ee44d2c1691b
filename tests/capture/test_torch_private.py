"""The parts of torch that are not public: whether they are there, and what is said where they are not."""

import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from baechi_ext.capture import torch_private
from baechi_ext.errors import MissingBackendError
from tests.torch_steps import make_step


def test_this_release_of_torch_is_one_that_was_tried() -> None:
    assert ".".join(torch.__version__.split(".")[:2]) in torch_private.TRIED_WITH


def test_the_joint_graph_says_what_its_ends_stand_for() -> None:
    step = make_step("tied")
    nodes = torch_private.joint_graph(step.module, step.inputs).graph.nodes
    kinds = {type(node.meta["desc"]).__name__ for node in nodes if node.op == "placeholder"}
    d = torch_private.descriptors()
    assert kinds == {"ParamAOTInput", "PlainAOTInput", "TangentAOTInput"}
    assert kinds < set(vars(d))


def test_a_profile_holds_what_was_allocated() -> None:
    with torch_private.memory_profile() as profiler:
        torch.ones(1000)
    assert 4000 in [event.nbytes() for event in torch_private.profiler_events(profiler) if event.name() == "[memory]"]


def test_the_last_of_two_threads_puts_the_checks_of_distributions_back() -> None:
    bad = partial(torch.distributions.Bernoulli, torch.tensor(2.0))
    first, second = torch_private.distributions_unchecked(), torch_private.distributions_unchecked()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    bad()
    second.__exit__(None, None, None)
    with pytest.raises(ValueError, match="constraint"):
        bad()


@pytest.mark.parametrize("module", ["torch._functorch.aot_autograd", "torch._functorch._aot_autograd"])
def test_a_release_without_them_is_named_beside_those_that_were_tried(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingBackendError, match=r"like 2\.11 or 2\.13 or 2\.14 or 2\.15, not 2\..*pip install 'torch==2\.15\.\*'"):
        torch_private.joint_graph(torch.nn.Identity(), ()) if module.endswith("h.aot_autograd") else torch_private.descriptors()


@pytest.mark.skipif(find_spec("triton") is None, reason="no triton, which says when Python ends what was not collected")
def test_python_ends_in_silence_after_an_import_without_the_collector() -> None:
    code = "from baechi_ext.collector import importing\nwith importing():\n    import torch._dynamo"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
