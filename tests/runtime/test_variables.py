"""Numbers that environment variables say: torchrun's are whole, and others are told from them."""

import pytest

from baechi_ext.errors import OptionError
from baechi_runtime.cli.flags.train import require_one_start
from baechi_runtime.host.variables import number_of
from baechi_runtime.torch.lowering.devices import cpu_workers
from baechi_runtime.torch.processes.environment import choose_interface


def test_what_is_not_set_is_the_default() -> None:
    assert [number_of("N", 3, environment) for environment in ({}, {"N": ""}, {"N": "12"})] == [3, 3, 12]
    assert number_of("N", 3, {"N": "0"}, least=0) == 0


@pytest.mark.parametrize("text", ["x", "-1", "0", "1.5", "²", "1" * 5000])
def test_what_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(OptionError, match=r"^\$WORLD_SIZE is '.*; expected a whole number from 1 on"):
        require_one_start("thread")
    with pytest.raises(OptionError, match=r"^\$LOCAL_WORLD_SIZE is '"):
        cpu_workers(2, {"LOCAL_WORLD_SIZE": text})


def test_a_port_that_is_no_number_is_named() -> None:
    with pytest.raises(OptionError, match=r"^\$MASTER_PORT is 'x'"):
        choose_interface({"MASTER_PORT": "x", "MASTER_ADDR": "localhost"})
