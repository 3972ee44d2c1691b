"""A module placed inside your own loop. `baechi_ext.parallelize` places the calls of your very module: the optimizer, gradient clipping,
the scheduler and the state_dict stay as they are. Its first placed calls also run unplaced, and are compared; then placed and plain steps
take turns, and the faster is kept. At the end the report says what that gained, and `unplace` ends it.

    python examples/own_loop.py --steps=20 --method=auto
"""

import argparse

import torch
from torch import nn

import baechi_ext


class Mixture(nn.Module):
    """A gate weighs what a few experts make of the same input: each expert can run on a device of its own."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, 1)) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(dim=1)
        return (weights * torch.cat([expert(x) for expert in self.experts], dim=1)).sum(dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--method", default="auto")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = baechi_ext.parallelize(Mixture(args.width, args.experts), devices=args.devices, method=args.method)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    x = torch.randn(128, args.width)
    y = x[:, :8].prod(dim=1).tanh()
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step in (0, args.steps - 1):
            print(f"step {step}: loss {loss.item():.6f}")
    print(baechi_ext.report(model))
    baechi_ext.unplace(model)
    print("unplaced:", type(model).__name__, "with", len(model.state_dict()), "tensors")


if __name__ == "__main__":
    main()
