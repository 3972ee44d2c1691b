"""Fine-tuning a BERT with fresh weights as a classifier: the model returns an object with .loss and .logits."""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


def main(args):
    torch.manual_seed(args.seed)
    config = BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=3,
    )
    model = BertForSequenceClassification(config)
    input_ids = torch.randint(60, (20, 10))
    labels = input_ids[:, 1] % 3
    attention_mask = (torch.arange(10) < torch.randint(5, 11, (20, 1))).long()
    loader = DataLoader(TensorDataset(input_ids, attention_mask, labels), batch_size=4, shuffle=True)

    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, args.epochs * len(loader))
    for _ in range(args.epochs):
        model.train()
        for ids, mask, y in loader:
            batch = {"input_ids": ids, "attention_mask": mask, "labels": y}
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(loss.item(), tuple(outputs.logits.shape))
        model.eval()
        with torch.no_grad():
            predictions = model(input_ids=input_ids, attention_mask=attention_mask).logits.argmax(-1)
        print("accuracy", (predictions == labels).float().mean().item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=42)
    main(parser.parse_args())
