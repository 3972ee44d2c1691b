"""Two models, trained against each other: one makes samples, and the other one, called three times a step, tells them from real ones."""

import torch
from torch import nn

NOISE, SIZE, BATCH = 8, 40, 6


class Maker(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(NOISE, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Linear(32, SIZE))

    def forward(self, noise):
        return torch.tanh(self.layers(noise))


class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SIZE, 32), nn.LeakyReLU(0.1, inplace=True), nn.Linear(32, 1))

    def forward(self, samples):
        return self.layers(samples).squeeze(1)


torch.manual_seed(0)
maker, judge = Maker(), Judge()
of_maker = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9))
of_judge = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.9))
loss = nn.BCEWithLogitsLoss()
is_real, is_made = torch.ones(BATCH), torch.zeros(BATCH)
for step in range(5):
    made = maker(torch.randn(BATCH, NOISE))
    of_judge.zero_grad()
    judged = loss(judge(torch.randn(BATCH, SIZE)), is_real)
    judged.backward()
    caught = loss(judge(made.detach()), is_made)
    caught.backward()
    of_judge.step()

    of_maker.zero_grad()
    fooled = loss(judge(made), is_real)
    fooled.backward()
    of_maker.step()
    print(step, judged.item(), caught.item(), fooled.item())
