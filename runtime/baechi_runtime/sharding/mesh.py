"""The device mesh of a group of processes."""

from collections.abc import Sequence
from itertools import combinations
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from baechi_ext.capture.torch_private import flatten_mesh
from baechi_ext.errors import OptionError
from baechi_runtime.sharding.layout import mesh_shape

_MOST_FLATTENED = 3
"""In a mesh with more dimensions only all of them together are flattened: each flattened mesh is one more process group."""


def checked_shape(processes: int, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """The mesh that was asked for, or that of the process count's prime factors. Raises OptionError where it is of another count."""
    if wanted is None:
        return mesh_shape(processes)
    if prod(wanted) != processes:
        shape = "x".join(map(str, wanted))
        likely = "x".join(map(str, mesh_shape(processes)))
        raise OptionError(f"--mesh={shape} has {prod(wanted)} processes, and {processes} run; give --mesh={likely}, or drop it")
    return tuple(wanted)


def make_mesh(device_type: str, shape: Sequence[int]) -> DeviceMesh:
    """The mesh over all processes of the group, in the order of their ranks. Every process has to call it."""
    mesh = init_device_mesh(device_type, tuple(shape), mesh_dim_names=tuple(f"dim{d}" for d in range(len(shape))))
    every = [c for n in range(2, len(shape) + 1) for c in combinations(range(len(shape)), n)]
    for dims in every if len(shape) <= _MOST_FLATTENED else every[-1:]:
        flatten_mesh(mesh, dims)  # DTensor goes over several dimensions at once where they are one as well
    return mesh


def groups(mesh: DeviceMesh, dims: Sequence[int]) -> list[dist.ProcessGroup]:
    """The process groups that a sum over these dimensions goes through, one after the other."""
    if len(dims) > 1 and (mesh.ndim <= _MOST_FLATTENED or len(dims) == mesh.ndim):
        return [flatten_mesh(mesh, dims).get_group()]
    return [mesh.get_group(d) for d in dims]
