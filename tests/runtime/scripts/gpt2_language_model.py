"""A small GPT-2 with fresh weights, trained on its own input; gradients of two batches are added up."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
accumulate = 2

model.train()
for step in range(6):
    tokens = (torch.arange(12) * 5 + torch.randint(64, (3, 1))) % 64
    out = model(tokens, labels=tokens)
    (out.loss / accumulate).backward()
    print(step, out.loss.item())
    if (step + 1) % accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
