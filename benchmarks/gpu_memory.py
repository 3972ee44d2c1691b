"""A GPU's memory beside tensors: the driver's, workspaces of cuBLAS and cuDNN, what torch's allocator takes beyond what it hands out.

    python -m benchmarks.gpu_memory [--model_names=A,B] --out=benchmarks/results/gpu_memory

Writes NAME.json and NAME.md. Each row has a process of its own. `outside` is what the driver counts as used beyond what torch's allocator
took, so nobody else may use the GPU meanwhile; `fragments` is what the allocator took beyond the tensors' highest sum. Then what
`baechi_runtime.torch.lowering.memory_limit` sets aside for each.
"""

import argparse
from collections.abc import Iterator

import torch

from baechi_ext.cost import attach_costs
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.report.tables import as_size
from baechi_runtime.torch.backend import capture
from baechi_runtime.torch.lowering.devices import cuda_devices
from baechi_runtime.torch.lowering.memory_limit import CONTEXT_BYTES, FRAGMENTS, WORKSPACE_BYTES
from baechi_runtime.torch.profiler import ProfileOptions, profile_step
from baechi_runtime.torch.streams.executor import StreamExecutor
from baechi_runtime.torch.streams.step_graph import CudaRecorder
from baechi_runtime.torch.streams.walk import WARM_UP_STEPS
from benchmarks.runner import Benchmark, Row, in_fresh_process, some_of, table
from benchmarks.sizes import SIZES

QUICK = ProfileOptions(warmup=1, repeats=2)
FLAGS = {"--model_names": some_of(SIZES, ("alexnet", "gnmt_v2", "inception_v3", "gpt2"))}


def context() -> Row:
    """A process that has done nothing but open the GPU."""
    torch.zeros(1, device="cuda")
    return {"what": "the first tensor", **_taken()}


def product() -> Row:
    """Its first matrix products: on a stream, and in a graph."""
    a = torch.ones(256, 256, device="cuda")
    before = torch.cuda.memory_allocated()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.mm(a, a)
        torch.addmm(a[0], a, a)
    on_stream = torch.cuda.memory_allocated() - before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mm(a, a)
        torch.addmm(a[0], a, a)
    in_graph = torch.cuda.memory_allocated() - before - on_stream
    return {"what": "matrix products", "workspace_bytes": [on_stream, in_graph], **_taken()}


def model(name: str, graphs: bool) -> Row:
    """A placed step on one device."""
    step, graph, binding = capture(TrainRequest(name, PlanRequest(), SIZES[name], num_devices=1, cuda=True))
    devices = cuda_devices(1)
    with StreamExecutor(devices) as executor:
        costed = attach_costs(graph, profile_step(executor, graph, binding, step, QUICK))
    torch.cuda.empty_cache()
    with StreamExecutor(devices, recorder=CudaRecorder if graphs else None) as executor:
        timeline = one_device_timeline(costed)
        placed = executor.load(timeline, binding, step)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM_UP_STEPS + 3):
            placed.run()
        taken = _taken()
    return {"what": name + " as a graph" * placed.is_graph, "planned_bytes": timeline.peak_memory_bytes[0], **taken}


def _taken() -> Row:
    torch.cuda.synchronize()
    free, whole = torch.cuda.mem_get_info()
    stats = torch.cuda.memory_stats()
    return {
        "outside_bytes": whole - free - stats["reserved_bytes.all.current"],
        "tensor_bytes": stats["allocated_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.peak"],
    }


def measure(args: argparse.Namespace) -> Iterator[Row]:
    constants = {"context_bytes": CONTEXT_BYTES, "workspace_bytes": WORKSPACE_BYTES, "fragments": FRAGMENTS}
    gpu = in_fresh_process(torch.cuda.get_device_name, 0)
    yield {"gpu": gpu, "set_aside": constants, "rows": [in_fresh_process(context), in_fresh_process(product)]}
    for name in args.model_names:
        yield {"rows": [in_fresh_process(model, name, graphs) for graphs in (False, True)]}


COLUMNS = {
    "what": "{what}",
    "outside": lambda row: as_size(row["outside_bytes"]),
    "workspace on a stream, in a graph": lambda row: " + ".join(map(as_size, row.get("workspace_bytes", ()))),
    "planned": lambda row: as_size(row["planned_bytes"]) if "planned_bytes" in row else "",
    "tensors": lambda row: as_size(row["tensor_bytes"]),
    "allocator": lambda row: as_size(row["reserved_bytes"]),
    "fragments": lambda row: f"{row['reserved_bytes'] / row['tensor_bytes'] - 1:.0%}" if "planned_bytes" in row else "",
}


def report(found: Row) -> str:
    """The result as Markdown."""
    aside = found["set_aside"]
    context, workspaces = as_size(aside["context_bytes"]), as_size(aside["workspace_bytes"])
    said = f"{context} outside, {workspaces} of workspaces, {aside['fragments']:.0%} fragments"
    return f"{table(COLUMNS, found['rows'])}\n\nOn {found['gpu']}. Set aside: {said}. `{found['command']}`"


main = Benchmark("gpu_memory", __doc__, FLAGS, measure, report, markdown=True).main

if __name__ == "__main__":
    main()
