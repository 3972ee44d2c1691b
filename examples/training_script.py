"""An ordinary training script: nothing in it knows of placing. A model of two towers, as one of images and texts would have, learns which
of two halves of its input is larger.

    python examples/training_script.py --epochs=2
    baechi train --placement_method=m_etf --num_devices=2 --out=run examples/training_script.py -- --epochs=2

The second command runs the very same script, with every training call of its model on two devices at once, and prints the same losses.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Towers(nn.Module):
    """Two stacks of layers, one for each half of the input, and a head that joins them."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.left, self.right = (self.tower(width, depth) for _ in range(2))
        self.head = nn.Linear(2 * width, 2)

    def tower(self, width: int, depth: int) -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=1)
        return self.head(torch.cat([self.left(left), self.right(right)], dim=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--examples", type=int, default=512)
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(args.examples, 2 * args.width)
    y = (x[:, : args.width].sum(dim=1) > x[:, args.width :].sum(dim=1)).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    model = Towers(args.width, args.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        total = 0.0
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: mean loss {total / len(loader):.6f}")


if __name__ == "__main__":
    main()
