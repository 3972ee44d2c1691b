"""A step that can't be captured is reported with the line of the model's code, and what to change there."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from baechi_ext.capture.torch_joint import CaptureOptions, capture_joint
from baechi_ext.errors import CaptureError


class Item(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).sum()
        return y * y.item()  # here


class Branch(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).sum()
        if y > 0:  # here
            return -y
        return y


class Chosen(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y[y > 0].sum()  # here


class Numpy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).sum()
        return y * float(np.max(y.detach().numpy()))  # here


class Mistaken(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum(dim=self.nowhere)  # here


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


CASES = {
    Item: r"a number is taken out of a tensor .*torch\.where",
    Branch: r"a number is taken out of a tensor .*torch\.where",
    Chosen: "the shape of the result depends on values",
    Numpy: "compute with torch functions",
    Mistaken: "take what is no computation on tensors out of forward",
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", CASES)
def test_the_line_is_named(kind: type[nn.Module], wrapped: bool) -> None:
    """The innermost line of the model's own code, however deep in other modules."""
    model = Outer(kind(4, 4)) if wrapped else kind(4, 4)
    with pytest.raises(CaptureError, match=CASES[kind]) as e:
        capture_joint(model, (torch.randn(2, 4),), CaptureOptions())
    lines = Path(__file__).read_text().splitlines()
    place, source = re.search(r"test_why_not\.py:(\d+) in forward: `(.*?)`;", str(e.value)).groups()
    assert lines[int(place) - 1].strip() == source
    assert source.endswith("# here")
    assert int(place) > next(i for i, line in enumerate(lines) if line.startswith(f"class {kind.__name__}("))
    assert str(e.value).startswith(f"the training step of {type(model).__name__} cannot be captured as one graph: ")
    assert "\n" not in str(e.value)
