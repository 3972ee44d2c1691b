"""A small convolutional network learns to tell where in an image the bright patch is: argparse, DataLoader workers, a scheduler."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adadelta
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class Patches(Dataset):
    """Noise, and a bright patch whose place is the label."""

    def __init__(self, size, seed):
        random = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(10, (size,), generator=random)
        self.images = 0.3 * torch.rand(size, 1, 28, 28, generator=random)
        for image, label in zip(self.images, self.labels.tolist()):
            top, left = 9 * (label // 4), 7 * (label % 4)
            image[0, top : top + 7, left : left + 6] += 1

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i] - 0.15, self.labels[i]


class Classifier(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.features = nn.ModuleList([nn.Conv2d(1, channels, 3), nn.Conv2d(channels, 2 * channels, 3)])
        self.hidden = nn.Linear(2 * channels * 12 * 12, 32)
        self.scores = nn.Linear(32, 10)
        self.drop = nn.Dropout2d(0.25)

    def forward(self, images):
        x = images
        for conv in self.features:
            x = conv(x).relu()
        x = self.drop(F.max_pool2d(x, 2)).flatten(1)
        x = F.dropout(F.relu(self.hidden(x)), training=self.training)
        return F.log_softmax(self.scores(x), dim=-1)


def run_epoch(model, loader, device, optimizer=None):
    """Mean loss and share of right answers; learns where there is an optimizer."""
    model.train(optimizer is not None)
    loss_sum, right, seen = 0.0, 0, 0
    with torch.set_grad_enabled(optimizer is not None):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            scores = model(images)
            loss = F.nll_loss(scores, labels)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(f"    batch of {len(labels)}: {loss.item()!r}")
            loss_sum += loss.item() * len(labels)
            right += (scores.argmax(dim=1) == labels).sum().item()
            seen += len(labels)
    return loss_sum / seen, right / seen


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--decay", type=float, default=0.7)
    parser.add_argument("--loaders", type=int, default=1)
    parser.add_argument("--keep", metavar="FILE")
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # 40 is no multiple of 16: the last batch of an epoch is smaller.
    learned = DataLoader(Patches(40, seed=0), batch_size=args.batch, shuffle=True, num_workers=args.loaders)
    unseen = DataLoader(Patches(50, seed=1), batch_size=50)
    model = Classifier().to(device)
    optimizer = Adadelta(model.parameters(), lr=args.rate)
    schedule = StepLR(optimizer, step_size=1, gamma=args.decay)
    for epoch in range(args.epochs):
        print(f"epoch {epoch}, rate {schedule.get_last_lr()[0]:.3f}")
        print("  learned", *run_epoch(model, learned, device, optimizer))
        print("  unseen ", *run_epoch(model, unseen, device))
        schedule.step()
    if args.keep:
        torch.save(model.state_dict(), args.keep)


if __name__ == "__main__":
    main()
