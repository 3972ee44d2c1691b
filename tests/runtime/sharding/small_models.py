"""Small modules that return their loss, with inputs: each kind of layer that captured graphs are described of."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Case = tuple[nn.Module, tuple[Tensor, ...]]
BATCH = 8


class Mlp(nn.Module):
    """Two layers and a loss."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32, bias=bias), nn.ReLU(), nn.Linear(32, 12, bias=bias))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.layers(x), labels)


class Cnn(nn.Module):
    """Convolutions, one in groups and one transposed, norms, pools, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, groups=4),
            nn.GroupNorm(4, 8),
            nn.AvgPool2d(2, 1),
            nn.ConvTranspose2d(8, 6, 2, 2),
            nn.InstanceNorm2d(6),
            nn.Upsample(scale_factor=2),
            nn.PixelUnshuffle(2),
            nn.GLU(1),
            nn.PixelShuffle(2),
            nn.Conv2d(3, 6, 1),
            nn.AdaptiveAvgPool2d((2, 2)),
        )
        self.classify = nn.Linear(24, 6)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.classify(self.features(x).flatten(1)), labels)


class Attention(nn.Module):
    """A block of a language model: embedding, positions, attention in one call or written out, feed-forward; the table is used twice."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.embed = nn.Embedding(20, 16)
        self.position = nn.Parameter(torch.randn(6, 16))
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words[:, :-1]) + self.position
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mask = torch.full((6, 6), float("-inf")).triu(1)
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = torch.softmax(q @ k.transpose(-1, -2) / 2.0 + mask, -1) @ v
        x = x + y.permute(0, 2, 1, 3).reshape(*words[:, :-1].shape, 16)
        x = x + self.down(functional.gelu(self.up(x)))
        return functional.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), words[:, 1:].flatten())


class Recurrent(nn.Module):
    """An LSTM of two layers and a GRU that reads it backwards, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.gru = nn.GRU(12, 6, batch_first=True, bidirectional=True)
        self.project = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(self.project(self.gru(self.lstm(x)[0])[0]), x)


class Mixed(nn.Module):
    """Products, parts and joints of tensors, and reductions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 12, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.einsum("bsk,hkn->bhsn", x, self.weight) + self.bias
        first, second = heads[:, 0], torch.stack([heads[:, 1], heads.select(1, 2)], 1).mean(1)
        joint = torch.cat([first, second.cumsum(1)], -1)
        scores = torch.baddbmm(joint.new_zeros(1), joint, joint.transpose(1, 2))
        return (scores.amax(-1, keepdim=True).expand(-1, -1, 4) * first).sum((1, 2)).square().mean()


class Foreign(nn.Module):
    """An op that no rule describes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(self.layer(x)).mean()


def images(channels: int = 4, size: int = 8, classes: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, channels, size, size), torch.randint(classes, (BATCH,))


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: (Mlp(), (torch.randn(BATCH, 16), torch.randint(12, (BATCH,)))),
    "cnn": lambda: (Cnn(), images()),
    "attention": lambda: (Attention(fused=True), (torch.randint(20, (BATCH, 7)),)),
    "attention written out": lambda: (Attention(fused=False), (torch.randint(20, (BATCH, 7)),)),
    "recurrent": lambda: (Recurrent(), (torch.randn(BATCH, 5, 8),)),
    "mixed": lambda: (Mixed(), (torch.randn(BATCH, 6, 12),)),
}
