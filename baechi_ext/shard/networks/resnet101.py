"""ResNet-101 (He et al., 2016), as PaSE has it: images of 227 pixels, 1000 classes."""

from baechi_ext.shard.layers import IMAGE, Layers, Value

BLOCKS = (3, 4, 23, 3)
EXPANSION = 4


def build(layers: Layers, batch: int) -> None:
    """Adds the network to `layers`."""
    x = Value((batch, 3, 227, 227), IMAGE)
    x = layers.batch_norm(layers.convolution(x, 64, (7, 7), stride=2, pad=(3, 3)))
    x = layers.pooling(x, (3, 3), 2, pad=(1, 1))
    for stage, blocks in enumerate(BLOCKS):
        for block in range(blocks):
            x = _bottleneck(layers, x, 64 * 2**stage, stride=2 if stage and not block else 1)
    x = layers.mean(x, (2, 3))
    layers.cross_entropy(layers.linear(x, 1000, "units"))


def _bottleneck(layers: Layers, x: Value, planes: int, stride: int) -> Value:
    y = layers.batch_norm(layers.convolution(x, planes, (1, 1)))
    y = layers.batch_norm(layers.convolution(y, planes, (3, 3), stride, pad=(1, 1)))
    y = layers.batch_norm(layers.convolution(y, planes * EXPANSION, (1, 1)))
    if x.shape[1] != planes * EXPANSION or stride > 1:
        x = layers.batch_norm(layers.convolution(x, planes * EXPANSION, (1, 1), stride))
    return layers.elementwise(y, x, pointwise=1)
