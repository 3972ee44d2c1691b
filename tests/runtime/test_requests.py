"""Requests that contradict themselves can't be made, whoever makes them: the command line, the library or a test."""

from dataclasses import replace
from typing import Any

import pytest

from baechi_ext.errors import OptionError
from baechi_ext.ir import Cluster, Link
from baechi_ext.ir.hints import DeviceMap
from baechi_ext.place.common import PlaceOptions
from baechi_runtime.drivers.comparison import CompareRequest
from baechi_runtime.drivers.costing import cluster_of
from baechi_runtime.drivers.link_report import ProbeRequest
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.train_request import HardwareRequest, RunOptions, ScriptRequest, TrainRequest

TRAIN = TrainRequest("gpt2", PlanRequest())
TENSORFLOW: dict[str, Any] = {"framework": "tensorflow", "workers": "process"}
SHARDED: dict[str, Any] = {"sharding": ("pase",), "workers": "process"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workers": "fiber"}, "workers='fiber' is unknown; choose process or thread"),
        ({"timeout_seconds": -1}, "timeout_seconds is -1; expected at least 0"),
        ({"timeout_seconds": 0}, "timeout_seconds is 0; expected a number above 0 and up to 1e+09"),
        ({"timeout_seconds": 1e10}, "timeout_seconds is 1e+10; expected a number above 0"),
        ({"split_gpu": True, "cuda": True, "workers": "process"}, "--split_gpu is for one process"),
        ({"use_free_memory": True}, "--use_free_memory is for CUDA devices"),
        ({"num_steps": 0}, "num_steps=0 is not a number of steps; give a whole number of at least 1"),
        ({"num_steps": "5"}, "num_steps='5' is not a number of steps"),
        ({"num_steps": True}, "num_steps=True is not a number of steps"),
        ({"mesh": (2, 1)}, "--mesh is for --sharding"),
        ({"sharding": ("pase",)}, "drop --workers=thread"),
        ({**SHARDED, **TENSORFLOW}, "drop --framework=tensorflow"),
        ({**SHARDED, "costgen": True}, "drop --costgen"),
        ({**SHARDED, "cluster": Cluster.uniform(2)}, "drop --cluster"),
        ({**SHARDED, "device_speeds": (1.0,)}, "drop --device_speeds"),
        ({**SHARDED, "relaxed_random": True}, "drop --relaxed_random"),
        ({**SHARDED, "memory_fraction": 0.5}, "drop --memory_fraction, or add --device_memory=SIZE"),
        ({**SHARDED, "link": Link()}, "drop --comm_cost_coeffs"),
        ({**SHARDED, "comm_cost_factor": 2.0}, "drop --comm_cost_factor"),
        ({**SHARDED, "cost_path": "costs.json"}, "drop --cost_path"),
        ({**SHARDED, "plan": PlanRequest("m_etf")}, "drop --placement_method=m_etf"),
        ({**SHARDED, "batch_norm_per_part": True}, "drop --batch_norm=per_part"),
        ({**SHARDED, "colocate_grads_with_ops": True}, "drop --colocate_grads_with_ops"),
        ({**SHARDED, "log_device_placement": True}, "drop --log_device_placement"),
        ({"task_index": 1}, "--task_index is a place in --cluster_hosts"),
        ({"cluster_hosts": ("a:1", "b:1")}, "--cluster_hosts is for --framework=tensorflow"),
        ({**TENSORFLOW, "workers": "thread", "cluster_hosts": ("a:1", "b:1")}, "drop --workers=thread"),
        ({**TENSORFLOW, "cluster_hosts": ("a:1",)}, "--cluster_hosts names 1 devices"),
        ({**TENSORFLOW, "cluster_hosts": ("a:1", "b:1"), "task_index": 2}, "--task_index=2 is not a place"),
        ({"cluster": Cluster.uniform(2), "link": Link()}, "--cluster and --comm_cost_coeffs cannot be used together"),
        ({"cluster": Cluster.uniform(2), "device_speeds": (1.0,)}, "--cluster and --device_speeds cannot be used together"),
        ({"cuda_graphs": True}, "--cuda_graphs is for CUDA devices of one process"),
        ({"cuda_graphs": True, "cuda": True, "workers": "process"}, "--cuda_graphs is for CUDA devices of one process"),
        ({**TENSORFLOW, "relaxed_random": True}, "--relaxed_random is for --framework=torch"),
        ({**TENSORFLOW, "compile": True}, "--compile is for --framework=torch"),
        ({"compile": True, "costgen": True}, "--costgen measures no placed step"),
        ({"compile": True, "run": RunOptions(2)}, "--train_steps measures no placed step"),
        ({"costgen": True, "run": RunOptions(2)}, "--costgen only profiles and --train_steps trains"),
        ({**TENSORFLOW, "batch_norm_per_part": True}, "--batch_norm=per_part is for parts of a batch"),
        ({"costgen": True, "microbatches": 4}, "--costgen profiles a step with its whole batch"),
        ({**TENSORFLOW, "microbatches": 2}, "--microbatches is for a built-in model or a script of PyTorch"),
        ({**SHARDED, "microbatches": None}, "--microbatches is for a built-in model or a script of PyTorch"),
        ({"microbatches": None, "cost_path": "costs.json"}, "--cost_path has the costs of a step with its whole batch"),
    ],
)
def test_a_run(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as refused:
        replace(TRAIN, **fields)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"costgen": True}, "--costgen profiles a built-in model"),
        (SHARDED, "baechi pase s.py finds how a script's layers are best split"),
        ({"workers": "process", "cuda": True}, "from one process; drop --workers=process"),
    ],
)
def test_a_script(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as refused:
        ScriptRequest("s.py", (), replace(TRAIN, **fields))
    assert message in str(refused.value)


def test_a_comparison_of_a_scripts_step() -> None:
    for fields, message in (({"cuda": True}, "drop the GPUs"), ({"compile": True}, "--compile is for built-in models")):
        with pytest.raises(OptionError, match=message):
            CompareRequest(replace(TRAIN, **fields), {}, "s.py")
        CompareRequest(replace(TRAIN, **fields), {})


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        (TENSORFLOW, "framework=tensorflow"),
        ({"run": RunOptions(2)}, "train_steps"),
        ({"workers": "process"}, "workers"),
        (SHARDED, "sharding"),
    ],
)
def test_a_plan_for_other_hardware(fields: dict[str, Any], flag: str) -> None:
    HardwareRequest(replace(TRAIN, cost_path="costs.json"), "h100", "cpu")
    with pytest.raises(OptionError, match="--cost_path and --measured_on go together"):
        HardwareRequest(TRAIN, "h100", "cpu")
    with pytest.raises(OptionError, match=f"--hardware=h100 plans a built-in model of PyTorch's and runs nothing; drop --{flag}$"):
        HardwareRequest(replace(TRAIN, **fields), "h100", None)


def test_links() -> None:
    with pytest.raises(OptionError, match="a link has two ends"):
        ProbeRequest(num_devices=1)
    with pytest.raises(OptionError, match="are for --framework=torch here"):
        ProbeRequest(framework="tensorflow", cuda=True, use_free_memory=True)


def test_a_plan() -> None:
    mapped = DeviceMap("map", {"": 0})
    assert PlanRequest("expert", device_map=mapped).device_map is mapped
    with pytest.raises(OptionError, match="--device_map is only for --placement_method=expert, auto, refine"):
        PlanRequest("m_etf", device_map=mapped)
    with pytest.raises(OptionError, match="--placeto_episodes are only for --placement_method=placeto"):
        PlanRequest("m_etf", options=PlaceOptions(placeto_episodes=2))


@pytest.mark.parametrize(
    ("fields", "issue_us"),
    [({"cuda": True, "cuda_graphs": False}, 30.0), ({"cuda": True}, 0.0), ({"cuda": True, "workers": "process"}, 0.0)],
)
def test_transfers_take_the_host_where_one_thread_gives_out_all_work(fields: dict[str, Any], issue_us: float) -> None:
    """A graph is one launch, and processes have hosts of their own."""
    link = Link(1e-3, 20.0)
    cluster = Cluster.uniform(2, link=replace(link, issue_us=30.0))
    request = replace(TRAIN, num_devices=2, **fields)
    for wanted in (request, replace(request, cluster=cluster)):
        assert cluster_of(wanted, 2, lambda: (cluster, None))[0].default == replace(link, issue_us=issue_us)
