"""A recurrent language model: nn.LSTM or nn.GRU, whose state goes on from stretch to stretch of a text, and updates by hand."""

import argparse
import math

import torch
from torch import nn

WORDS, COLUMNS, STRETCH = 30, 4, 6


class LanguageModel(nn.Module):
    def __init__(self, cell, units, layers, dropout, tied):
        super().__init__()
        self.words = nn.Embedding(WORDS, units)
        self.cells = {"LSTM": nn.LSTM, "GRU": nn.GRU}[cell](units, units, layers, dropout=dropout)
        self.next_word = nn.Linear(units, WORDS)
        self.dropout = nn.Dropout(dropout)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        if tied:
            self.next_word.weight = self.words.weight

    def forward(self, words, state):
        seen, state = self.cells(self.dropout(self.words(words)), state)
        return self.next_word(self.dropout(seen)).flatten(0, 1).log_softmax(-1), state

    def first_state(self, columns):
        zeros = torch.zeros(self.cells.num_layers, columns, self.cells.hidden_size)
        return (zeros, zeros.clone()) if isinstance(self.cells, nn.LSTM) else zeros


def cut_off(state):
    """The state without its past, so that gradients end at the stretch."""
    return tuple(part.detach() for part in state) if isinstance(state, tuple) else state.detach()


def stretches(text):
    """Words and the words after them, column by column; the last stretch is shorter."""
    columns = text[: len(text) // COLUMNS * COLUMNS].view(COLUMNS, -1).t()
    for begin in range(0, len(columns) - 1, STRETCH):
        end = min(begin + STRETCH, len(columns) - 1)
        yield columns[begin:end], columns[begin + 1 : end + 1].reshape(-1)


def learn(model, text, rate):
    model.train()
    state = model.first_state(COLUMNS)
    for words, following in stretches(text):
        state = cut_off(state)
        model.zero_grad()
        scores, state = model(words, state)
        loss = nn.functional.nll_loss(scores, following)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for weight in model.parameters():
            weight.data.sub_(rate * weight.grad)
        print(f"  {loss.item()!r}, perplexity {math.exp(loss.item()):.4f}")


@torch.no_grad()
def examine(model, text):
    model.eval()
    losses, state = [], model.first_state(COLUMNS)
    for words, following in stretches(text):
        scores, state = model(words, state)
        losses.append(nn.functional.nll_loss(scores, following).item())
    return sum(losses) / len(losses)


parser = argparse.ArgumentParser()
parser.add_argument("--cell", choices=["LSTM", "GRU"], default="LSTM")
parser.add_argument("--units", type=int, default=16)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--rate", type=float, default=20.0)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--tied", action="store_true")
args = parser.parse_args()

torch.manual_seed(1111)
text = (7 * torch.arange(130) + torch.randint(3, (130,))) % WORDS
model = LanguageModel(args.cell, args.units, args.layers, args.dropout, args.tied)
best, rate = math.inf, args.rate
for epoch in range(args.epochs):
    print(f"epoch {epoch}")
    learn(model, text, rate)
    now = examine(model, text[:60])
    print(f"  exam {now!r}")
    rate, best = (rate, now) if now < best else (rate / 4, best)
