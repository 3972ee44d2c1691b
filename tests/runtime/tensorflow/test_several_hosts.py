"""Two hosts, each with an address of its own and a cable between them: the same command on both, and the cable pulled."""

import json
from pathlib import Path

from tests.runtime.namespaces import ADDRESSES, require_namespaces, two_nodes

COMMAND = [
    *("-m", "baechi_ext", "train", "--framework=tensorflow", "--model_name=wide_towers", "--batch_size=2"),
    *("--image_size=2", "--d_model=8", "--num_layers=1", "--placement_method=round_robin", "--comm_cost_coeffs=0.001,50"),
    "--cluster_hosts=" + ",".join(f"{address}:2222" for address in ADDRESSES),
]
TIMEOUT_SECONDS = 5


def on_two_hosts(*flags: str) -> list[list[str]]:
    return [[*COMMAND, *flags], [*COMMAND, *flags, "--task_index=1"]]


def test_a_step_on_two_hosts() -> None:
    require_namespaces()
    first, second = two_nodes(on_two_hosts("--num_steps=2", "--json"))
    assert (first["code"], second["code"]) == (0, 0), first["err"] + second["err"]
    report = json.loads(first["out"])
    assert second["out"] == ""
    assert (report["parity"]["passed"], report["executor"], report["num_devices"]) == (True, "servers of several hosts", 2)
    assert report["transfers"] > 0


def test_a_host_is_cut_off(tmp_path: Path) -> None:
    """In mid-measurement: the host that drives says which one is gone, both end by themselves, and nothing is left."""
    require_namespaces()
    flags = [f"--out={tmp_path}", "--num_steps=1000000", f"--timeout={TIMEOUT_SECONDS}"]
    first, second = two_nodes(on_two_hosts(*flags), cut=tmp_path / "plan.json")
    said = [line for line in first["err"].splitlines() if line.startswith("error:")]
    assert (first["code"], len(said)) == (1, 1), first["err"]
    assert "the server of device 1 (10.77.0.2:2222) is gone" in said[0] or "did not answer within" in said[0]
    assert second["code"] in (0, 1), second["err"]
    assert first["left"] == []
