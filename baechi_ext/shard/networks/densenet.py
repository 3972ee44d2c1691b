"""DenseNet-121 (Huang et al., 2017): each layer reads all that come before it in its block. Exact tables grow with the block's length."""

from baechi_ext.shard.layers import IMAGE, Layers, Value

BLOCKS = (6, 12, 24, 16)
GROWTH = 32


def build(layers: Layers, batch: int) -> None:
    """Adds the network to `layers`."""
    x = Value((batch, 3, 224, 224), IMAGE)
    x = layers.batch_norm(layers.convolution(x, 2 * GROWTH, (7, 7), stride=2, pad=(3, 3)))
    x = layers.pooling(x, (3, 3), 2, pad=(1, 1))
    for i, length in enumerate(BLOCKS):
        parts = [x]
        for _ in range(length):
            parts.append(_layer(layers, _joined(layers, parts)))
        x = layers.batch_norm(_joined(layers, parts))
        if i < len(BLOCKS) - 1:
            x = layers.pooling(layers.convolution(x, x.shape[1] // 2, (1, 1)), (2, 2), 2)
    layers.cross_entropy(layers.linear(layers.mean(x, (2, 3)), 1000, "units"))


def _layer(layers: Layers, x: Value) -> Value:
    y = layers.convolution(layers.batch_norm(x), 4 * GROWTH, (1, 1))
    return layers.convolution(layers.batch_norm(y), GROWTH, (3, 3), pad=(1, 1))


def _joined(layers: Layers, parts: list[Value]) -> Value:
    return layers.concat(parts, 1) if len(parts) > 1 else parts[0]
