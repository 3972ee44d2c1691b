"""Sizes of the built-in models whose steps a few cores compute in half a second or so."""

from baechi_runtime.models.registry import ModelOptions

SIZES = {
    "inception_v3": ModelOptions(8, 149),
    "wide_towers": ModelOptions(),
    "gnmt_v2": ModelOptions(16, num_devices=2, vocab_size=2000, max_seq_length=20, rnn_units=256, num_layers=4),
    "nasnet": ModelOptions(8),
    "transformer": ModelOptions(4),
    "gpt2": ModelOptions(),
    "resnet101": ModelOptions(4, 128),
    "alexnet": ModelOptions(8),
    "rnnlm": ModelOptions(),
}
