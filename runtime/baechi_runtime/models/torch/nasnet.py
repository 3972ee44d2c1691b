"""NASNet-A (Zoph et al. 2018, "Learning Transferable Architectures for Scalable Image Recognition", figure 4 and appendix A).

N normal cells, a reduction cell, N normal cells, a reduction cell, N normal cells; each cell reads the outputs of the two before it.
Without the auxiliary head, and without drop-path and the dropout before the last layer. Padding is symmetric.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from baechi_ext.errors import OptionError
from baechi_runtime.models.torch.cells import Grid, Norm, adjust, average, project, separable
from baechi_runtime.models.torch.images import labelled

STEM_FILTERS = 96
"""The networks for ImageNet have so many; those for CIFAR-10 have STEM_MULTIPLIER for each of the first cells' filters, which are 32."""
STEM_MULTIPLIER = 3


@dataclass(frozen=True, slots=True)
class Options:
    """By default the paper's 6 @ 768 for CIFAR-10. None: 8 images of 32 pixels and 32 filters, or `large`: 2 of 331 and 168."""

    batch_size: int | None = None
    image_size: int | None = None
    """Height and width in pixels."""
    nasnet_cells: int = 6
    """N, the normal cells between reductions."""
    nasnet_filters: int | None = None
    """F, the filters of the first cells; the last ones end in 24 F channels."""
    large: bool = False
    """The stem and the other sizes of 6 @ 4032 for ImageNet."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Differences between the published networks."""

    cells: int
    filters: int
    classes: int
    imagenet_stem: bool
    """A convolution of stride 2 and two reduction cells, instead of one convolution."""
    skips_reductions: bool
    """True if the second input of the cell after a reduction cell is that cell's second input, instead of its first."""
    stem_filters: int = STEM_FILTERS


class NormalCell(nn.Module):
    """(current, previous) -> the adjusted previous and five sums, (batch, 6 filters, size, size)."""

    def __init__(self, current: Grid, previous: Grid, filters: int) -> None:
        super().__init__()
        self.output = Grid(6 * filters, current.halvings)
        self.current = project(current.channels, filters)
        self.previous = adjust(previous, current, filters)
        wide, narrow = [separable(filters, filters, 5) for _ in range(2)], [separable(filters, filters, 3) for _ in range(3)]
        self.left = nn.ModuleList([*wide, average(), average(), narrow[2]])
        self.right = nn.ModuleList([*narrow[:2], average()])

    def forward(self, current: Tensor, previous: Tensor) -> Tensor:
        h, p = self.current(current), self.previous(previous)
        sums = [
            self.left[0](h) + self.right[0](p),
            self.left[1](p) + self.right[1](p),
            self.left[2](h) + p,
            self.left[3](p) + self.right[2](p),
            self.left[4](h) + h,
        ]
        return torch.cat([p, *sums], dim=1)


class ReductionCell(nn.Module):
    """(current, previous) -> four sums, (batch, 4 filters, size / 2, size / 2). Where both are one tensor, its second use is as it is."""

    def __init__(self, current: Grid, previous: Grid, filters: int) -> None:
        super().__init__()
        self.output = Grid(4 * filters, current.halvings + 1)
        self.current = project(current.channels, filters)
        alone = previous is current
        self.previous = nn.Identity() if alone else adjust(previous, current, filters)
        pools = [nn.MaxPool2d(3, 2, 1), average(2), average()]
        self.left = nn.ModuleList([separable(filters, filters, 5, 2), *pools, separable(filters, filters, 3)])
        inputs = current.channels if alone else filters
        self.right = nn.ModuleList([*(separable(inputs, filters, kernel, 2) for kernel in (7, 7, 5)), nn.MaxPool2d(3, 2, 1)])

    def forward(self, current: Tensor, previous: Tensor) -> Tensor:
        h, p = self.current(current), self.previous(previous)
        first = self.left[0](h) + self.right[0](p)
        second = self.left[1](h) + self.right[1](p)
        third = self.left[2](h) + self.right[2](p)
        fourth = self.left[3](first) + second
        return torch.cat([second, third, fourth, self.left[4](first) + self.right[3](h)], dim=1)


class NasNetA(nn.Module):
    """Images (batch, 3, size, size) -> logits (batch, classes)."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        stride = 2 if layout.imagenet_stem else 1
        stem = nn.Conv2d(3, layout.stem_filters, 3, stride, 0 if layout.imagenet_stem else 1, bias=False)
        self.stem = nn.Sequential(stem, Norm(layout.stem_filters))
        self.skips_reductions = layout.skips_reductions
        self.cells = nn.ModuleList()
        self.stem_cells = 2 if layout.imagenet_stem else 0
        previous = current = Grid(layout.stem_filters, 0)
        kinds: list[tuple[type[ReductionCell] | type[NormalCell], int]]
        kinds = [(ReductionCell, layout.filters // part) for part in (4, 2)[: self.stem_cells]]
        for stage in range(3):
            filters = layout.filters * 2**stage
            kinds += [(ReductionCell, filters)] * (stage > 0) + [(NormalCell, filters)] * layout.cells
        for i, (kind, filters) in enumerate(kinds):
            cell = kind(current, previous, filters)
            self.cells.append(cell)
            previous, current = previous if self._skips(i) else current, cell.output
        self.head = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(current.channels, layout.classes))

    def _skips(self, i: int) -> bool:
        """True if the second input of the cell after cell i is cell i's second input."""
        return self.skips_reductions and i >= self.stem_cells and isinstance(self.cells[i], ReductionCell)

    def forward(self, x: Tensor) -> Tensor:
        previous = current = self.stem(x)
        for i, cell in enumerate(self.cells):
            y = cell(current, previous)
            previous, current = previous if self._skips(i) else current, y
        return self.head(current)


CIFAR = Layout(cells=6, filters=32, classes=10, imagenet_stem=False, skips_reductions=False)
"""6 @ 768."""
LARGE = Layout(cells=6, filters=168, classes=1000, imagenet_stem=True, skips_reductions=True)
"""6 @ 4032."""


def build(options: Options) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model, random images and labels. Raises OptionError for images or filters it cannot take."""
    layout, batch, size, smallest = (LARGE, 2, 331, 33) if options.large else (CIFAR, 8, 32, 4)
    filters = options.nasnet_filters or layout.filters
    stem = STEM_FILTERS if options.large else STEM_MULTIPLIER * filters
    layout = replace(layout, cells=options.nasnet_cells, filters=filters, stem_filters=stem)
    batch, size = options.batch_size or batch, options.image_size or size
    if options.large and layout.filters % 4:
        raise OptionError(f"--nasnet_filters={layout.filters} does not suit --large; it takes a multiple of 4")
    model = NasNetA(layout)
    return model, labelled("nasnet", batch, size, smallest=smallest, classes=layout.classes)
