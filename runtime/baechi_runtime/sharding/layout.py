"""Where the parts of a node's tensors are: which dimensions of the device mesh split which of the node's axes.

The mesh has a dimension for every prime factor of the process count, so that any divisor of it is a product of some. A configuration is
laid out by giving each axis as many mesh dimensions as make its split; mesh dimensions that are left over hold copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from baechi_ext.capture.torch_private import flatten_mesh
from baechi_ext.errors import OptionError
from baechi_ext.shard.graph import Tensor
from baechi_ext.shard.tables import divisors

Placements = tuple[Placement, ...]
"""A placement for each mesh dimension."""
Assignment = tuple[int | None, ...]
"""For each mesh dimension the axis that it splits; None: it holds copies."""


def mesh_shape(processes: int) -> tuple[int, ...]:
    """The prime factors of a process count, largest first: the outermost dimension is between machines. (1,) for one process."""
    factors: list[int] = []
    while (left := processes // prod(factors)) > 1:
        factors.append(divisors(left, left)[1])
    return tuple(reversed(factors)) or (1,)


def placements(tensor: Tensor, assignment: Assignment, absent: Placement) -> Placements:
    """Where a tensor's parts are. `absent` is its placement on mesh dimensions whose axis it does not have: Replicate() of what is read,
    Partial() of a sum over that axis, and of the gradient of what is read."""
    found: list[Placement] = []
    for axis in assignment:
        dims = [i for i, axes in enumerate(tensor.axes) if axis in axes]
        found.append(Replicate() if axis is None else Shard(dims[0]) if dims else absent)
    return tuple(found)


@dataclass(frozen=True)
class Argument:
    """A tensor as it is read: `placements` of its values, `gradient` of what backward gives for it."""

    placements: Placements
    gradient: Placements

    @classmethod
    def of(cls, tensor: Tensor, assignment: Assignment) -> "Argument":
        return cls(placements(tensor, assignment, Replicate()), placements(tensor, assignment, Partial()))


@dataclass(frozen=True)
class Layout:
    """A node laid out: how it reads its tensors, in the order of its arguments, and where what it writes is."""

    assignment: Assignment
    arguments: tuple[Argument, ...]
    outputs: tuple[Placements, ...]


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


def flattened(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """The dimensions of a mesh that messages go over together, as over one."""
    every = [c for n in range(2, len(shape) + 1) for c in combinations(range(len(shape)), n)]
    return every if len(shape) <= _MOST_FLATTENED else every[-1:]


def make_mesh(device_type: str, shape: Sequence[int]) -> DeviceMesh:
    """The mesh over all processes of the group, in the order of their ranks. Every process has to call it."""
    mesh = init_device_mesh(device_type, tuple(shape), mesh_dim_names=tuple(f"dim{d}" for d in range(len(shape))))
    for dims in flattened(shape):
        flatten_mesh(mesh, dims)  # DTensor goes over several dimensions at once where they are one as well
    return mesh


def groups(mesh: DeviceMesh, dims: Sequence[int]) -> list[dist.ProcessGroup]:
    """The process groups that a sum over these dimensions goes through, one after the other."""
    if tuple(dims) in flattened(mesh.shape):
        return [flatten_mesh(mesh, dims).get_group()]
    return [mesh.get_group(d) for d in dims]
