"""Two workers that send over NCCL; rank 0 prints what they saw. Started by run_workers.

Device 1 receives a tensor before device 0 sends it, and another one only when device 0 has ended its step, but for the wait for its sends.
"""

import json
from datetime import timedelta

import torch

from baechi_runtime.torch.lowering.devices import cuda_workers
from baechi_runtime.torch.processes.channels import StreamChannels
from baechi_runtime.torch.processes.environment import worker_place
from baechi_runtime.torch.processes.worker_group import WorkerGroup
from tests.torch_steps import capture, make_step, scattered

TIMEOUT_SECONDS = 60.0


def sending(group: WorkerGroup, channels: StreamChannels, tensor: int, like: torch.Tensor) -> None:
    give = channels.giver(tensor, 1)
    heard(group, "goes on")
    give(like + 2)
    channels.finish()
    give(like + 3)
    group.store.set("sends", "")
    channels.finish()
    taken_by_then = group.store.check(["takes"])
    print(json.dumps({"taken by then": taken_by_then, **json.loads(heard(group, "found"))}))


def receiving(group: WorkerGroup, channels: StreamChannels, tensor: int) -> None:
    post, take = channels._poster(tensor), channels.taker(tensor, 1)
    post(None)
    first = take()
    group.store.set("goes on", "")
    channels.finish()
    heard(group, "sends")
    group.store.set("takes", "")
    post(None)
    second = take()
    channels.finish()
    group.store.set("found", json.dumps({"values": [first.unique().tolist(), second.unique().tolist()]}))


def heard(group: WorkerGroup, word: str) -> bytes:
    group.store.wait([word], timedelta(seconds=TIMEOUT_SECONDS))
    return group.store.get(word)


def main() -> None:
    rank, _ = worker_place()
    device = cuda_workers(2)[rank]
    device.enter()
    step = make_step("tied")
    graph, binding = capture(step)
    timeline = scattered(graph, 2, 1)
    tensor = next(x.tensor for x in timeline.transfers if x.source == 0 and graph.tensors[x.tensor].bytes)
    with WorkerGroup.join(TIMEOUT_SECONDS, device.torch_device) as group:
        channels = StreamChannels(timeline, binding, group, device)
        if rank:
            receiving(group, channels, tensor)
        else:
            like, _ = channels._like(tensor)
            sending(group, channels, tensor, torch.zeros(like.shape, dtype=like.dtype, device=device.torch_device))


if __name__ == "__main__":
    main()
