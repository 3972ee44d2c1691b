"""The parts that a step's batch is split into."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baechi_ext.errors import CaptureError

if TYPE_CHECKING:
    import torch


NORMALISED = (
    "BatchNorm normalises each part of the batch by itself, as --batch_norm=per_part allows; running means and variances are those of the "
    "first part"
)
"""The note on a step of which that is so."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a step's batch: how many examples each has, and along which dimension of each input they stand."""

    sizes: tuple[int, ...]
    dims: tuple[int | None, ...]
    """An entry per input; None: every part reads all of it."""
    batch_norm_per_part: bool = False
    """BatchNorm may see each part by itself, as DistributedDataParallel has it; its running values are those of the first part."""

    @classmethod
    def of(cls, inputs: "Sequence[torch.Tensor]", sizes: Sequence[int], dim: int = 0, *, batch_norm_per_part: bool = False) -> "Parts":
        """Parts of these sizes, along dimension `dim` of each input that is as long as all of them there; others are read whole. Raises
        CaptureError where there is none: another dimension of that length need not be the batch's, as steps of time are not."""
        batch = sum(sizes)
        dims = tuple(dim if value.dim() > dim and value.shape[dim] == batch else None for value in inputs)
        if all(found is None for found in dims):
            raise CaptureError(
                f"no input has the batch's {batch} examples along dimension {dim}, so none can be split; give --microbatches=1"
            )
        return cls(tuple(sizes), dims, batch_norm_per_part)

    @property
    def weights(self) -> list[float]:
        """The share of the batch's examples that each part has."""
        return [size / sum(self.sizes) for size in self.sizes]

    def rows(self, index: int, part: int) -> tuple[int, int, int] | None:
        """The dimension of an input, the begin and the length of what a part reads of it; None where it reads all."""
        dim = self.dims[index]
        return None if dim is None else (dim, sum(self.sizes[:part]), self.sizes[part])

    def inputs_of(self, inputs: "Sequence[torch.Tensor]", part: int) -> "list[torch.Tensor]":
        """The inputs as a part reads them."""
        return [value if (rows := self.rows(i, part)) is None else value.narrow(*rows).contiguous() for i, value in enumerate(inputs)]


def shared_sizes(batch: int, shares: Sequence[float]) -> tuple[int, ...]:
    """The sizes of parts of a batch in proportion to `shares`, as near as whole examples come (Hamilton's method: what is left over goes to
    the largest remainders, the first of equal ones); parts that come to no example are left out."""
    exact = [batch * share / sum(shares) for share in shares]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: sizes[i] - exact[i])
    for i in by_remainder[: batch - sum(sizes)]:
        sizes[i] += 1
    return tuple(size for size in sizes if size)
