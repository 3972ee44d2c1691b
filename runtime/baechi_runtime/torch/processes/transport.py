"""The choice of what carries a placed step's tensors between worker processes."""

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.simulate import Timeline
from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.processes.channels import Channels, Phase
from baechi_runtime.torch.processes.posted_channels import PostedChannels
from baechi_runtime.torch.processes.shared_channels import SharedChannels
from baechi_runtime.torch.processes.stream_channels import StreamChannels
from baechi_runtime.torch.processes.worker_group import WorkerGroup


def channels_of(timeline: Timeline, binding: Binding, group: WorkerGroup, device: TorchDevice, phase: Phase | None = None) -> Channels:
    """The channels of a step, or of a phase of it: shared memory where all workers have lines to each other, and room for all that comes to
    them in a step; otherwise torch.distributed. The same on all workers."""
    if device.torch_device.type != "cpu":
        return StreamChannels(timeline, binding, group, device)
    if group.lines is not None and _has_room(timeline):
        return SharedChannels(timeline, binding, group, group.lines, phase)
    return PostedChannels(timeline, binding, group, device, phase)


def _has_room(timeline: Timeline) -> bool:
    """True if every device has memory for all that comes to it in a step beside the step's peak."""
    coming = [0.0] * len(timeline.cluster)
    for transfer in timeline.transfers:
        coming[transfer.target] += timeline.graph.tensors[transfer.tensor].bytes
    limits = (device.memory_bytes for device in timeline.cluster.devices)
    return all(limit is None or peak + more <= limit for limit, peak, more in zip(limits, timeline.peak_memory_bytes, coming, strict=True))
