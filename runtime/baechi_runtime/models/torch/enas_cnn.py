"""Convolutional networks drawn from the two search spaces of ENAS (Pham et al. 2018, arXiv 1802.03268, sections 2.3 and 2.4), for CIFAR-10.

Macro: a chain of layers of one op each, some of which also read former layers. Micro: normal and reduction cells of blocks that add
two ops each. Networks are drawn uniformly, not searched for; ENAS's official code is followed where the paper leaves something open.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import cast

import torch
from torch import Tensor, nn

from baechi_runtime.models.torch.cells import Grid, Halve, Norm, adjust, average, project, separable

MACRO_OPS = ("conv3", "conv5", "separable3", "separable5", "average3", "max3")
MICRO_OPS = ("identity", "separable3", "separable5", "average3", "max3")
FEWEST_LAYERS, MOST_LAYERS = 6, 12
SKIP_RATE = 0.4
"""The share of skip connections that ENAS aims at (section 3.2)."""
BLOCKS = 5
STAGES, CLASSES = 3, 10


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that are not searched for."""

    batch_size: int = 8
    image_size: int = 32
    """Height and width in pixels."""
    filters: int = 24
    """Filters of the first stage; each of the other two has twice as many, on images of half the size."""


@dataclass(frozen=True, slots=True)
class Macro:
    """`ops[i]` of layer i reads layer i - 1; what comes out is joined with the outputs of the layers `skips[i]`, all before i."""

    ops: tuple[str, ...]
    skips: tuple[tuple[int, ...], ...]

    @classmethod
    def sample(cls, draw: Random) -> "Macro":
        """A network of 6 to 12 layers."""
        layers = draw.randint(FEWEST_LAYERS, MOST_LAYERS)
        ops = tuple(draw.choice(MACRO_OPS) for _ in range(layers))
        return cls(ops, tuple(tuple(j for j in range(i) if draw.random() < SKIP_RATE) for i in range(layers)))

    def stage(self, layer: int) -> int:
        return layer * STAGES // len(self.ops)


@dataclass(frozen=True, slots=True)
class Block:
    """Adds two ops of what two nodes give: node 0 is the cell before, node 1 the one before that, node k + 2 block k."""

    reads: tuple[int, int]
    ops: tuple[str, str]


Cell = tuple[Block, ...]
"""The output is the concatenation of the blocks that no other block reads."""


@dataclass(frozen=True, slots=True)
class Micro:
    """`cells` normal cells in each of three stages, and a reduction cell between stages."""

    normal: Cell
    reduction: Cell
    cells: int

    @classmethod
    def sample(cls, draw: Random) -> "Micro":
        """One or two normal cells a stage."""
        return cls(_sample_cell(draw), _sample_cell(draw), draw.randint(1, 2))


def _sample_cell(draw: Random) -> Cell:
    """A cell that reads both cells before it: where one were read by nobody, part of the network would do nothing."""
    while True:
        cell = tuple(
            Block((draw.randrange(k + 2), draw.randrange(k + 2)), (draw.choice(MICRO_OPS), draw.choice(MICRO_OPS)))
            for k in range(BLOCKS)
        )
        if {0, 1} <= {node for block in cell for node in block.reads}:
            return cell


def _op(kind: str, filters: int, stride: int = 1) -> nn.Module:
    """An op of a cell, from `filters` channels to as many."""
    match kind:
        case "identity":
            return nn.Identity() if stride == 1 else Halve(filters, filters)
        case "average3":
            return average(stride)
        case "max3":
            return nn.MaxPool2d(3, stride, 1)
        case _:
            return separable(filters, filters, int(kind[-1]), stride)


class SearchedCell(nn.Module):
    """(the cell before, the one before that) -> the concatenation of the blocks nobody reads. A reduction cell reads both at stride 2."""

    def __init__(self, cell: Cell, inputs: tuple[Grid, Grid], filters: int, *, reduction: bool) -> None:
        super().__init__()
        current, previous = inputs
        self.cell = cell
        self.current, self.previous = project(current.channels, filters), adjust(previous, current, filters)
        self.ops = nn.ModuleList(
            nn.ModuleList(_op(kind, filters, 2 if reduction and node < 2 else 1) for node, kind in zip(b.reads, b.ops, strict=True))
            for b in cell
        )
        read = {node for block in cell for node in block.reads}
        self.loose = [k for k in range(2, len(cell) + 2) if k not in read]
        self.output = Grid(len(self.loose) * filters, current.halvings + reduction)

    def forward(self, current: Tensor, previous: Tensor) -> Tensor:
        nodes = [self.current(current), self.previous(previous)]
        for block, ops in zip(self.cell, cast(Iterable[nn.ModuleList], self.ops), strict=True):
            left, right = (op(nodes[node]) for node, op in zip(block.reads, ops, strict=True))
            nodes.append(left + right)
        return torch.cat([nodes[k] for k in self.loose], dim=1)


class MicroNetwork(nn.Module):
    """Images (batch, 3, size, size) -> logits (batch, 10)."""

    def __init__(self, layout: Micro, filters: int) -> None:
        super().__init__()
        self.stem = _stem(3 * filters)
        self.cells = nn.ModuleList()
        current = previous = Grid(3 * filters, 0)
        for stage in range(STAGES):
            kinds = ([layout.reduction] if stage else []) + [layout.normal] * layout.cells
            for i, cell in enumerate(kinds):
                searched = SearchedCell(cell, (current, previous), filters * 2**stage, reduction=stage > 0 and i == 0)
                self.cells.append(searched)
                current, previous = searched.output, current
        self.head = _head(current.channels)

    def forward(self, x: Tensor) -> Tensor:
        current = previous = self.stem(x)
        for cell in self.cells:
            current, previous = cell(current, previous), current
        return self.head(current)


class MacroLayer(nn.Module):
    """(the layer before, the layers it skips to) -> its op, joined with these by a 1x1 convolution."""

    def __init__(self, kind: str, filters: int, skips: int) -> None:
        super().__init__()
        kernel = int(kind[-1])
        match kind:
            case "average3":
                op: nn.Module = average()
            case "max3":
                op = nn.MaxPool2d(3, 1, 1)
            case "conv3" | "conv5":
                op = nn.Conv2d(filters, filters, kernel, 1, kernel // 2, bias=False)
            case _:
                depthwise = nn.Conv2d(filters, filters, kernel, 1, kernel // 2, groups=filters, bias=False)
                op = nn.Sequential(depthwise, nn.Conv2d(filters, filters, 1, bias=False))
        self.op = nn.Sequential(project(filters, filters), nn.ReLU(), op, Norm(filters))
        self.join = project((skips + 1) * filters, filters) if skips else None

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        y = self.op(x)
        return y if self.join is None else self.join(torch.cat([y, *skips], dim=1))


class MacroNetwork(nn.Module):
    """Images (batch, 3, size, size) -> logits (batch, 10). What a later stage reads of a former one is halved on the way, once."""

    def __init__(self, layout: Macro, filters: int) -> None:
        super().__init__()
        self.layout = layout
        self.stem = _stem(filters)
        self.layers, self.halves = nn.ModuleList(), nn.ModuleDict()
        for i, (kind, skips) in enumerate(zip(layout.ops, layout.skips, strict=True)):
            self.layers.append(MacroLayer(kind, filters * 2 ** layout.stage(i), len(skips)))
            for j in (i - 1, *skips):
                for stage in range(self._stage(j), layout.stage(i)):
                    if f"{j}_{stage}" not in self.halves:
                        self.halves[f"{j}_{stage}"] = Halve(filters * 2**stage, filters * 2 ** (stage + 1))
        self.head = _head(filters * 2 ** (STAGES - 1))

    def _stage(self, layer: int) -> int:
        return 0 if layer < 0 else self.layout.stage(layer)

    def forward(self, x: Tensor) -> Tensor:
        # Layer -> its output, as each stage reads it; layer -1 is the stem.
        outputs = {-1: {0: self.stem(x)}}
        for i, layer in enumerate(self.layers):
            stage = self.layout.stage(i)
            x, *skips = (self._at(outputs[j], j, stage) for j in (i - 1, *self.layout.skips[i]))
            outputs[i] = {stage: layer(x, skips)}
        return self.head(outputs[len(self.layers) - 1][STAGES - 1])

    def _at(self, output: dict[int, Tensor], layer: int, stage: int) -> Tensor:
        """The output of a layer as this stage reads it."""
        for s in range(max(output), stage):
            output[s + 1] = self.halves[f"{layer}_{s}"](output[s])
        return output[stage]


def _stem(filters: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, filters, 3, 1, 1, bias=False), Norm(filters))


def _head(channels: int) -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def build(layout: Macro | Micro, sizes: Sizes) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The network, random images and labels."""
    network = MacroNetwork(layout, sizes.filters) if isinstance(layout, Macro) else MicroNetwork(layout, sizes.filters)
    batch, size = sizes.batch_size, sizes.image_size
    return network, (torch.randn(batch, 3, size, size), torch.randint(CLASSES, (batch,)))
