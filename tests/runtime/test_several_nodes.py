"""Two nodes, each with an address of its own and a cable between them: the same command under torchrun on both, and the cable pulled."""

import json
import re
import socket
from pathlib import Path

import pytest

from baechi_ext.errors import ExecutionError
from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.host.processor import available_cores
from baechi_runtime.torch.cluster import pairs_to_probe
from baechi_runtime.torch.lowering.devices import cpu_workers
from baechi_runtime.torch.processes.environment import INTERFACE, choose_interface
from tests.runtime.namespaces import ADDRESSES, require_namespaces, two_nodes
from tests.runtime.trainings import GPT2, STEP, costs_of, here, losses_of

PARTED = ("train", *GPT2, "--microbatches=3,1", "--optimizer=adam") + (
    "--placement_method=round_robin",
    "--comm_cost_coeffs=0.001,100",
    "--device_speeds=1",
)
STEPS = 5
TIMEOUT_SECONDS = 3
ENDS_WITHIN = 45.0
"""Seconds beyond --timeout; generous, since the machine may be busy."""


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> str:
    require_namespaces()
    return costs_of(tmp_path_factory.mktemp("costs"))


def on_two_nodes(*flags: str, per_node: int = 1) -> list[list[str]]:
    """The same command for each node but for its number, as torchrun is told."""
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={per_node}"]
    meeting = [f"--master-addr={ADDRESSES[0]}", "--master-port=29500"]
    command = ["-m", "baechi_ext", *flags, "--workers=process", f"--num_devices={2 * per_node}"]
    return [[*torchrun, f"--node-rank={rank}", *meeting, *command] for rank in range(2)]


def test_parity_and_losses(costs: str, tmp_path: Path) -> None:
    """Four devices; a checkpoint that both nodes write, taken up by threads."""
    run = tmp_path / "run"
    flags = (*STEP, costs, "--train_steps=3", f"--checkpoint={run}", "--json")
    first, second = two_nodes(on_two_nodes(*flags, per_node=2))
    assert (first["code"], second["code"]) == (0, 0), first["err"] + second["err"]
    report = json.loads(first["out"])
    assert second["out"] == ""
    assert (report["parity"]["passed"], report["parity"]["max_abs_diff"]) == (True, 0.0)
    assert [d["name"] for d in report["cluster"]["devices"]] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert len({d["memory_bytes"] for d in report["cluster"]["devices"]}) == 1
    whole = losses_of(costs, f"--train_steps={STEPS}")
    assert report["losses"] == whole[:3]
    assert losses_of(costs, f"--train_steps={STEPS}", f"--checkpoint={run}", "--resume") == whole


def test_parts_of_a_batch(tmp_path: Path) -> None:
    """Parts of unequal sizes on two nodes, a checkpoint, and the same two go on; the losses are those of threads that never stopped."""
    require_namespaces()
    run = (*PARTED, f"--checkpoint={tmp_path / 'run'}", "--json")
    begun, _ = two_nodes(on_two_nodes(*run, "--train_steps=2", f"--out={tmp_path / 'out'}"))
    assert begun["code"] == 0, begun["err"]
    report = json.loads(begun["out"])
    assert report["parity"]["passed"]
    assert len(set(RunFolder.load(tmp_path / "out").plan.placement)) == 2
    resumed, second = two_nodes(on_two_nodes(*run, "--resume", "--train_steps=4"))
    assert (resumed["code"], second["code"], second["out"]) == (0, 0, ""), resumed["err"] + second["err"]
    whole = json.loads(here("--train_steps=4", "--json", step=PARTED))["losses"]
    assert (report["losses"], json.loads(resumed["out"])["losses"]) == (whole[:2], whole)


def test_links_across_nodes_and_on_one_are_probed_apart() -> None:
    """The first pair of each kind is probed; across nodes first, since it stands for all that are not told apart."""
    across, within = pairs_to_probe(cpu_workers(4, {"LOCAL_WORLD_SIZE": "2"}))
    assert across == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert within == [(0, 1), (1, 0), (2, 3), (3, 2)]
    assert pairs_to_probe(cpu_workers(2, {"LOCAL_WORLD_SIZE": "1"})) == [[(0, 1), (1, 0)]]
    assert pairs_to_probe(cpu_workers(4, {})) == [[(0, 1)]]


def test_a_node_is_cut_off(costs: str, tmp_path: Path) -> None:
    """Its cable is pulled in mid-training: both nodes end by themselves, and the training goes on elsewhere."""
    run = tmp_path / "run"
    flags = (*STEP, costs, "--train_steps=1000000", f"--checkpoint={run}", "--checkpoint_every=1", f"--timeout={TIMEOUT_SECONDS}")
    first, second = two_nodes(on_two_nodes(*flags), cut=run / "step_00000002" / "checkpoint.json")
    assert (first["code"], second["code"]) == (1, 1)
    assert first["seconds"] < TIMEOUT_SECONDS + ENDS_WITHIN
    assert first["left"] == []
    said = [line for line in first["err"].splitlines() if line.startswith("error:")]
    assert len(said) == 1, first["err"]
    assert re.search(r"output of op '[\w.]+' from device 1|the worker of device 1 did not answer", said[0])
    assert "--resume goes on from the checkpoint of step" in said[0]
    said = [line for line in second["err"].splitlines() if line.startswith("error:")]
    assert len(said) == 1, second["err"]
    assert re.search(r"output of op '[\w.]+' from device 0|device 0 gave no sign of life", said[0])
    steps = max(int(path.name.removeprefix("step_")) for path in run.glob("step_*")) + 2
    assert losses_of(costs, f"--train_steps={steps}", f"--checkpoint={run}", "--resume") == losses_of(costs, f"--train_steps={steps}")


def test_devices_of_several_nodes() -> None:
    """Names go by rank, cores by the rank on the node."""
    devices = cpu_workers(4, {"LOCAL_WORLD_SIZE": "2"})
    cores = available_cores()
    assert [d.name for d in devices] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert [d.node for d in devices] == [0, 0, 1, 1]
    assert [d.core for d in devices] == [cores[i % len(cores)] for i in (0, 1, 0, 1)]


def test_the_interface_is_the_users_where_one_is_named() -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", INTERFACE: "wlan7"}
    choose_interface(environment)
    assert environment[INTERFACE] == "wlan7"


@pytest.mark.parametrize("address", ["no such host", ""])
def test_where_no_way_leads_to_the_address_no_interface_is_chosen(address: str) -> None:
    environment = {"MASTER_ADDR": address, "MASTER_PORT": "1"}
    choose_interface(environment)
    assert INTERFACE not in environment


@pytest.mark.parametrize("sizes", [{}, {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}])
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_on_one_machine_the_interface_is_its_own(address: str, sizes: dict[str, str]) -> None:
    environment = {"MASTER_ADDR": address, "MASTER_PORT": "1", **sizes}
    choose_interface(environment)
    assert environment[INTERFACE] == "lo"


def test_a_name_of_the_loopback_interface_is_of_another_where_there_are_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a machine's own name is on Debian; here it is a number that is no address in its usual form."""
    meant = {"MASTER_ADDR": "0x7f000001", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}
    own = {**meant, INTERFACE: "wlan7"}
    choose_interface(own)
    assert own[INTERFACE] == "wlan7"
    way_out = "baechi_runtime.torch.processes.environment._ELSEWHERE"
    monkeypatch.setattr(way_out, "")
    with pytest.raises(ExecutionError, match=f"MASTER_ADDR=0x7f000001 is an .* by {INTERFACE}$"):
        choose_interface(dict(meant))
    monkeypatch.setattr(way_out, "127.0.0.1")  # as good as any that every machine has
    choose_interface(meant)
    assert meant[INTERFACE] == "lo"


def test_on_one_machine_the_interface_is_its_own_whatever_the_address() -> None:
    environment = {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    choose_interface(environment)
    assert (environment[INTERFACE], environment["MASTER_ADDR"]) == ("lo", "127.0.0.1")


def test_a_recorded_script(tmp_path: Path) -> None:
    """Worker 1's times are put on worker 0's clock, and the measured step says to within what."""
    require_namespaces()
    script = Path(__file__).parent / "scripts" / "mnist.py"
    flags = ("train", "--placement_method=random", "--keep_placed", "--comm_cost_coeffs=0.001,50", f"--out={tmp_path / 'run'}", str(script))
    first, second = two_nodes([[*command, "--", "--epochs", "8"] for command in on_two_nodes(*flags)])
    assert (first["code"], second["code"]) == (0, 0), first["err"] + second["err"]
    found = RunFolder.load(tmp_path / "run")
    assert {op.id for op in found.measured.ops} == set(found.graph.index)
    assert {op.device for op in found.measured.ops} == {0, 1}
    said = [note for note in found.measured.notes if "another machine" in note]
    assert re.fullmatch(r"cpu:1 is on another machine; its times may be off by \d+ us", said[0])
