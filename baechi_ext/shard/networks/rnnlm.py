"""A language model of two LSTM layers (Jozefowicz et al., 2016), as PaSE has it: 256 steps, 100,000 words."""

from baechi_ext.shard.layers import Layers, Value

STEPS, WORDS, LSTM_LAYERS = 256, 100_000, 2


def build(layers: Layers, batch: int, units: int) -> None:
    """Adds the network to `layers`."""
    x = layers.embedding(Value((batch, STEPS), ("batch", "sequence")), WORDS, units)
    x = layers.lstm(x, LSTM_LAYERS)
    layers.cross_entropy(layers.linear(x, WORDS, "vocabulary"))
