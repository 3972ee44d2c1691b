"""GPT-2 (Radford et al. 2019) as `transformers` builds it, with fresh weights: nothing is downloaded.

By default a small one. GPT-2 small, 124,439,808 parameters, is --num_layers=12 --d_model=768 --num_heads=12 --vocab_size=50257
--max_seq_length=1024.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from baechi_ext.errors import MissingBackendError, OptionError


@dataclass(frozen=True, slots=True)
class Options:
    batch_size: int = 4
    vocab_size: int = 8192
    max_seq_length: int = 128
    """Words of every text, and learned positions."""
    num_layers: int = 4
    d_model: int = 256
    """Width of what passes from layer to layer; the feed-forward layers are four times as wide."""
    num_heads: int = 4
    dropout: float = 0.1
    """Dropout rate of embeddings, attention weights and the output of every sub-layer."""


class Gpt2(nn.Module):
    """Texts (batch, steps + 1) of words -> the mean cross-entropy of the next word. The embedding is also the output projection."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ImportError as e:
            raise MissingBackendError(f"the model gpt2 needs transformers ({e}); pip install 'baechi-ext[transformers]'") from e
        config = GPT2Config(  # type: ignore[call-arg]  # every configuration takes attn_implementation; their types leave it out
            vocab_size=options.vocab_size,
            n_positions=options.max_seq_length,
            n_embd=options.d_model,
            n_layer=options.num_layers,
            n_head=options.num_heads,
            resid_pdrop=options.dropout,
            embd_pdrop=options.dropout,
            attn_pdrop=options.dropout,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
            attn_implementation="eager",
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, words: Tensor) -> Tensor:
        steps = words.shape[1] - 1
        # A mask that is given is not derived from the words, which would be a branch on tensor values.
        mask = torch.full((1, 1, steps, steps), float("-inf"), device=words.device).triu(1)
        logits = self.model(input_ids=words[:, :-1], attention_mask=mask).logits
        return functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def build(options: Options) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model, which returns its loss, and random words.

    Raises OptionError where the heads do not share the width evenly, MissingBackendError without transformers.
    """
    if options.d_model % options.num_heads:
        raise OptionError(f"--d_model={options.d_model} does not suit --num_heads={options.num_heads}; it takes a multiple of that")
    return Gpt2(options), (torch.randint(options.vocab_size, (options.batch_size, options.max_seq_length + 1)),)
