"""Automatic mixed precision on the CPU, in bfloat16."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 32), *(Block(32) for _ in range(3)), nn.Linear(32, 5))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", enabled=False)
for _ in range(5):
    input, target = torch.randn(8, 20), torch.randint(5, (8,))
    with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
        output = model(input)
        assert output.dtype is torch.bfloat16
        loss = loss_fn(output, target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(loss.item())
