"""Meshes, and what of a configuration can be laid out on one."""

from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from baechi_ext.shard.graph import Axis, Node, Tensor
from baechi_runtime.sharding.binding import assignments
from baechi_runtime.sharding.calibration import probed_links
from baechi_runtime.sharding.layout import Argument, groups, make_mesh, mesh_shape, placements

LINEAR = Node(
    "linear",
    "linear",
    (Axis("batch", 12), Axis("units", 12), Axis("in_units", 12)),
    (Tensor((12, 12), ((0,), (2,))),),
    (Tensor((12, 12), ((0,), (1,))),),
    weights=(Tensor((12, 12), ((1,), (2,))),),
)
FLAT = Node("flatten", "reshape", (Axis("b", 2), Axis("s", 4)), (Tensor((2, 4), ((0,), (1,))),), (Tensor((8,), ((0, 1),)),))


@pytest.mark.parametrize(("processes", "shape"), [(1, (1,)), (2, (2,)), (7, (7,)), (8, (2, 2, 2)), (12, (3, 2, 2)), (36, (3, 3, 2, 2))])
def test_a_mesh_has_a_dimension_for_every_prime_factor(processes: int, shape: tuple[int, ...]) -> None:
    assert mesh_shape(processes) == shape


def test_ways_to_lay_a_configuration_out() -> None:
    assert assignments(LINEAR, (2, 2, 1), (2, 2)) == [(0, 1), (1, 0)]
    assert assignments(LINEAR, (4, 1, 1), (2, 2)) == [(0, 0)]
    assert assignments(LINEAR, (2, 1, 1), (2, 2)) == [(0, None), (None, 0)]
    assert assignments(LINEAR, (1, 1, 6), (3, 2, 2)) == [(2, 2, None), (2, None, 2)]


@pytest.mark.parametrize(("configuration", "mesh"), [((3, 1, 1), (2, 2)), ((2, 2, 1), (3, 2)), ((2, 2, 2), (2, 2)), ((4, 1, 1), (2,))])
def test_what_a_mesh_cannot_express(configuration: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    assert assignments(LINEAR, configuration, mesh) == []


def test_a_dimension_of_two_loops_is_split_from_the_outer_one_on() -> None:
    assert assignments(FLAT, (2, 2), (2, 2)) == [(0, 1)]
    assert assignments(FLAT, (1, 2), (2, 2)) == []
    assert assignments(FLAT, (2, 1), (2, 2)) == [(0, None), (None, 0)]


def test_placements_follow_the_axes() -> None:
    batch_and_sum = (0, 2)
    assert placements(LINEAR.outputs[0], batch_and_sum, Partial()) == (Shard(0), Partial())
    assert Argument.of(LINEAR.inputs[0], batch_and_sum) == Argument((Shard(0), Shard(1)), (Shard(0), Shard(1)))
    assert Argument.of(LINEAR.weights[0], batch_and_sum) == Argument((Replicate(), Shard(1)), (Partial(), Shard(1)))


@pytest.mark.parametrize("processes", [8, 12, 16])
def test_a_sum_over_any_dimensions_goes_through_groups_whose_messages_are_probed(processes: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        mesh = make_mesh("cpu", mesh_shape(processes))
        links = probed_links(mesh, torch.device("cpu"))
        every = [dims for n in range(1, mesh.ndim + 1) for dims in combinations(range(mesh.ndim), n)]
        sizes = {group.size() for dims in every for group in groups(mesh, dims)}
    finally:
        dist.destroy_process_group()
    assert sizes == {size for _, size in links.probed}
