"""NASNet-A: the published sizes, and cells wired as in figure 4 of the paper."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from baechi_ext.capture.torch_joint import CaptureOptions, capture_joint
from baechi_ext.errors import OptionError
from baechi_runtime.models.torch.cells import Grid, Halve
from baechi_runtime.models.torch.nasnet import CIFAR, LARGE, Layout, NasNetA, NormalCell, Options, ReductionCell, build
from baechi_runtime.models.training_step import WithLoss

MOBILE = Layout(cells=4, filters=44, classes=1000, imagenet_stem=True, skips_reductions=False, stem_filters=32)


@pytest.mark.parametrize(
    ("layout", "parameters", "published"),
    [(CIFAR, 3_328_234, 3.3e6), (MOBILE, 5_289_978, 5.3e6), (LARGE, 88_753_150, 88.9e6)],
    ids=["6 @ 768", "4 @ 1056", "6 @ 4032"],
)
def test_parameters(layout: Layout, parameters: int, published: float) -> None:
    """Tables 1 and 2 of the paper. 5,289,978 and 88,753,150 are also the counts of Keras's NASNetMobile and NASNetLarge."""
    with torch.device("meta"):
        model = NasNetA(layout)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert parameters == pytest.approx(published, rel=0.015)


def test_cells_and_channels() -> None:
    """6 @ 768: 6 normal cells, a reduction, 6, a reduction, 6; the last ones end in 768 channels."""
    with torch.device("meta"):
        model = NasNetA(CIFAR)
    kinds = "".join("N" if isinstance(cell, NormalCell) else "R" for cell in model.cells)
    assert kinds == "NNNNNNRNNNNNNRNNNNNN"
    assert model.head[-1].in_features == model.cells[-1].output.channels == 768
    with torch.device("meta"):
        model = NasNetA(LARGE)
    assert (len(model.cells), model.head[-1].in_features) == (22, 4032)
    assert [cell.output.halvings for cell in model.cells] == [1, 2, *[2] * 6, 3, *[3] * 6, 4, *[4] * 6]


def reads(kind: type[nn.Module], *kept: tuple[str, int]) -> set[tuple[int, str]]:
    """(block of the output, input) for each input that a block depends on, where all branches but some give zeros."""
    torch.manual_seed(0)
    cell = a_cell(kind)
    cell.current, cell.previous = nn.Identity(), nn.Identity()
    for name in ("left", "right"):
        for i, branch in enumerate(getattr(cell, name)):
            if (name, i) not in kept:
                branch.forward = lambda x, forward=branch.forward: forward(x) * 0
    h, p = (torch.randn(2, 4, 8, 8, requires_grad=True) for _ in range(2))
    found = set()
    for i, block in enumerate(cell(h, p).split(4, dim=1)):
        gradients = torch.autograd.grad(block.square().sum(), (h, p), retain_graph=True, materialize_grads=True)
        found |= {(i, name) for name, g in zip("hp", gradients, strict=True) if g.any()}
    return found


def a_cell(kind: type[nn.Module]) -> nn.Module:
    return kind(Grid(4, 0), Grid(4, 0), 4)


@pytest.mark.parametrize(
    ("kind", "side", "index", "expected"),
    [
        # Blocks of a normal cell: p itself, then the sums; identities (p in the third sum, h in the fifth) stay.
        (NormalCell, "left", 0, {(1, "h")}),
        (NormalCell, "right", 0, {(1, "p")}),
        (NormalCell, "left", 1, {(2, "p")}),
        (NormalCell, "right", 1, {(2, "p")}),
        (NormalCell, "left", 2, {(3, "h")}),
        (NormalCell, "left", 3, {(4, "p")}),
        (NormalCell, "right", 2, {(4, "p")}),
        (NormalCell, "left", 4, set()),
        # Blocks of a reduction cell: the second to the fifth sum; the first is read by the fourth and fifth only.
        (ReductionCell, "left", 1, {(0, "h"), (2, "h")}),
        (ReductionCell, "right", 1, {(0, "p"), (2, "p")}),
        (ReductionCell, "left", 2, {(1, "h")}),
        (ReductionCell, "right", 2, {(1, "p")}),
        (ReductionCell, "right", 3, {(3, "h")}),
        (ReductionCell, "left", 0, set()),
        (ReductionCell, "right", 0, set()),
    ],
)
def test_wiring(kind: type[nn.Module], side: str, index: int, expected: set[tuple[int, str]]) -> None:
    identities = {(0, "p"), (3, "p"), (5, "h")} if kind is NormalCell else set()
    assert reads(kind, (side, index)) == expected | identities


def test_the_first_sum_of_a_reduction_cell_is_read_inside() -> None:
    first = ("left", 0), ("right", 0)
    assert reads(ReductionCell, *first, ("left", 3)) == {(2, "h"), (2, "p")}
    assert reads(ReductionCell, *first, ("left", 4)) == {(3, "h"), (3, "p")}


def test_kernels() -> None:
    def kernels(branch: nn.Module) -> list[tuple[int, int]]:
        return [(m.kernel_size[0], m.stride[0]) for m in branch.modules() if isinstance(m, nn.Conv2d) and m.groups > 1]

    normal, reduction = a_cell(NormalCell), a_cell(ReductionCell)
    assert [kernels(b) for b in normal.left] == [[(5, 1)] * 2, [(5, 1)] * 2, [], [], [(3, 1)] * 2]
    assert [kernels(b) for b in normal.right] == [[(3, 1)] * 2, [(3, 1)] * 2, []]
    assert [kernels(b) for b in reduction.left] == [[(5, 2), (5, 1)], [], [], [], [(3, 1)] * 2]
    assert [kernels(b) for b in reduction.right] == [[(7, 2), (7, 1)], [(7, 2), (7, 1)], [(5, 2), (5, 1)], []]


def test_halving_keeps_every_second_pixel_and_its_neighbour() -> None:
    halve = Halve(1, 2)
    nn.init.ones_(halve.even.weight)
    nn.init.ones_(halve.odd.weight)
    halve.norm = nn.Identity()
    x = torch.arange(1.0, 26.0).view(1, 1, 5, 5)
    even, odd = halve(x)[0]
    assert even.tolist() == [[1, 3, 5], [11, 13, 15], [21, 23, 25]]
    assert odd.tolist() == [[7, 9, 0], [17, 19, 0], [0, 0, 0]]


def test_hundreds_of_ops_and_no_counters() -> None:
    torch.manual_seed(0)
    module, inputs = build(Options(batch_size=2, image_size=8, nasnet_cells=1, nasnet_filters=4))
    assert module.stem[0].out_channels == 3 * 4
    graph, _ = capture_joint(WithLoss(module), inputs, CaptureOptions())
    kinds = Counter(op.op for op in graph.ops if op.phase == "forward")
    assert len(graph) > 500
    assert kinds["aten.convolution"] == sum(isinstance(m, nn.Conv2d) for m in module.modules())
    assert not [op for op in graph.ops if "num_batches_tracked" in (op.colocation or "")]
    assert not any(name.endswith("num_batches_tracked") for name, _ in module.named_buffers())
    assert {op.expert for op in graph.ops} == {None}


def test_the_network_for_imagenet_runs() -> None:
    torch.manual_seed(0)
    module, (images, labels) = build(Options(image_size=33, nasnet_cells=1, nasnet_filters=8, large=True))
    assert (tuple(images.shape), tuple(labels.shape)) == ((2, 3, 33, 33), (2,))
    logits = module(images)
    assert logits.shape == (2, 1000)
    assert logits.isfinite().all()
    assert [tuple(i.shape) for i in build(Options())[1]] == [(8, 3, 32, 32), (8,)]


def test_a_reduction_is_skipped_or_not() -> None:
    """After the first reduction, a cell's second input is what the reduction read first, or in the large network second."""
    tiny = Layout(cells=1, filters=8, classes=3, imagenet_stem=False, skips_reductions=False, stem_filters=6)
    read = [NasNetA(replace(tiny, skips_reductions=skips)).cells[2].previous.even.in_channels for skips in (False, True)]
    assert read == [6 * 8, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 3}, "--image_size=3 is too small for nasnet; it takes 4 pixels or more"),
        ({"image_size": 32, "large": True}, "--image_size=32 is too small for nasnet; it takes 33 pixels or more"),
        ({"nasnet_filters": 6, "large": True}, "--nasnet_filters=6 does not suit --large; it takes a multiple of 4"),
    ],
)
def test_sizes_it_cannot_take(options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build(Options(**options))
