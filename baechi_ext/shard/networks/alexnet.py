"""AlexNet (Krizhevsky, 2012) with its two towers joined, as PaSE has it: images of 227 pixels, 1024 classes."""

from baechi_ext.shard.layers import IMAGE, Layers, Value


def build(layers: Layers, batch: int) -> None:
    """Adds the network to `layers`."""
    x = Value((batch, 3, 227, 227), IMAGE)
    x = layers.pooling(layers.convolution(x, 96, (11, 11), stride=4, pointwise=1), (3, 3), 2)
    x = layers.pooling(layers.convolution(x, 256, (5, 5), pad=(2, 2), pointwise=1), (3, 3), 2)
    for channels in (384, 384, 256):
        x = layers.convolution(x, channels, (3, 3), pad=(1, 1), pointwise=1)
    x = layers.pooling(x, (3, 3), 2)
    x = layers.flatten(x, (batch, 256 * 6 * 6), ("batch", "features"))
    for units, pointwise in ((4096, 1), (4096, 1), (1024, 0)):
        x = layers.linear(x, units, "units", pointwise)
    layers.cross_entropy(x)
