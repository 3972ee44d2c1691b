"""A residual network with a learning-rate scheduler, which saves checkpoints and goes on from one."""

import argparse
import os

import torch
from torch import nn, optim


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True))
        self.b = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.b(self.a(x))
        out += x
        return self.relu(out)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--epochs", default=4, type=int)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(3)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 4))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Residual(8), Residual(8), head)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    start = 0
    if args.resume:
        if os.path.isfile(args.checkpoint):
            checkpoint = torch.load(args.checkpoint)
            start = checkpoint["epoch"]
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            scheduler.load_state_dict(checkpoint["scheduler"])
            print(f"going on at epoch {start}")
    for epoch in range(start, args.epochs):
        torch.manual_seed(100 + epoch)
        model.train()
        for _ in range(2):
            images, target = torch.randn(4, 3, 10, 10), torch.randint(4, (4,))
            loss = criterion(model(images), target)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            print(epoch, loss.item(), scheduler.get_last_lr()[0])
        scheduler.step()
        torch.save(
            {
                "epoch": epoch + 1,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            },
            args.checkpoint,
        )


if __name__ == "__main__":
    main()
