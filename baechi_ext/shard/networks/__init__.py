"""The networks that `baechi pase` knows by name, built layer by layer."""

from collections.abc import Callable

from baechi_ext.errors import ShardError
from baechi_ext.shard.graph import MOST_ITERATIONS, ShardGraph
from baechi_ext.shard.layers import IMAGE, Layers, Value
from baechi_ext.shard.networks import inception3, transformer
from baechi_ext.shard.rules import Rules
from baechi_ext.shard.rules_original import OriginalRules

_RESNET_BLOCKS = (3, 4, 23, 3)
_EXPANSION = 4
_DENSE_BLOCKS = (6, 12, 24, 16)
_GROWTH = 32
_STEPS, _WORDS, _LSTM_LAYERS = 256, 100_000, 2


def alexnet(layers: Layers, batch: int) -> None:
    """AlexNet (Krizhevsky, 2012) with its two towers joined, as PaSE has it: images of 227 pixels, 1024 classes."""
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


def resnet101(layers: Layers, batch: int) -> None:
    """ResNet-101 (He et al., 2016), as PaSE has it: images of 227 pixels, 1000 classes."""
    x = Value((batch, 3, 227, 227), IMAGE)
    x = layers.batch_norm(layers.convolution(x, 64, (7, 7), stride=2, pad=(3, 3)))
    x = layers.pooling(x, (3, 3), 2, pad=(1, 1))
    for stage, blocks in enumerate(_RESNET_BLOCKS):
        for block in range(blocks):
            x = _bottleneck(layers, x, 64 * 2**stage, stride=2 if stage and not block else 1)
    x = layers.mean(x, (2, 3))
    layers.cross_entropy(layers.linear(x, 1000, "units"))


def _bottleneck(layers: Layers, x: Value, planes: int, stride: int) -> Value:
    y = layers.batch_norm(layers.convolution(x, planes, (1, 1)))
    y = layers.batch_norm(layers.convolution(y, planes, (3, 3), stride, pad=(1, 1)))
    y = layers.batch_norm(layers.convolution(y, planes * _EXPANSION, (1, 1)))
    if x.shape[1] != planes * _EXPANSION or stride > 1:
        x = layers.batch_norm(layers.convolution(x, planes * _EXPANSION, (1, 1), stride))
    return layers.elementwise(y, x, pointwise=1)


def densenet121(layers: Layers, batch: int) -> None:
    """DenseNet-121 (Huang et al., 2017): each layer reads all before it in its block. Exact tables grow with the block."""
    x = Value((batch, 3, 224, 224), IMAGE)
    x = layers.batch_norm(layers.convolution(x, 2 * _GROWTH, (7, 7), stride=2, pad=(3, 3)))
    x = layers.pooling(x, (3, 3), 2, pad=(1, 1))
    for i, length in enumerate(_DENSE_BLOCKS):
        parts = [x]
        for _ in range(length):
            parts.append(_dense_layer(layers, _joined(layers, parts)))
        x = layers.batch_norm(_joined(layers, parts))
        if i < len(_DENSE_BLOCKS) - 1:
            x = layers.pooling(layers.convolution(x, x.shape[1] // 2, (1, 1)), (2, 2), 2)
    layers.cross_entropy(layers.linear(layers.mean(x, (2, 3)), 1000, "units"))


def _dense_layer(layers: Layers, x: Value) -> Value:
    y = layers.convolution(layers.batch_norm(x), 4 * _GROWTH, (1, 1))
    return layers.convolution(layers.batch_norm(y), _GROWTH, (3, 3), pad=(1, 1))


def _joined(layers: Layers, parts: list[Value]) -> Value:
    return layers.concat(parts, 1) if len(parts) > 1 else parts[0]


def rnnlm(layers: Layers, batch: int, units: int) -> None:
    """A language model of two LSTM layers (Jozefowicz et al., 2016), as PaSE has it: 256 steps, 100,000 words."""
    x = layers.embedding(Value((batch, _STEPS), ("batch", "sequence")), _WORDS, units)
    x = layers.lstm(x, _LSTM_LAYERS)
    layers.cross_entropy(layers.linear(x, _WORDS, "vocabulary"))


Build = Callable[..., None]
NETWORKS: dict[str, tuple[Build, int, int | None]] = {
    "alexnet": (alexnet, 4, None),
    "resnet101": (resnet101, 4, None),
    "inception3": (inception3.build, 4, None),
    "rnnlm": (rnnlm, 1, 2048),
    "transformer": (transformer.build, 1, 512),
    "densenet121": (densenet121, 4, None),
}
"""Name -> what adds the network to layers, the original's least share of an axis, and the published hidden width where it can be chosen."""
COST_MODELS = ("default", "original")


def network(name: str, batch: int, width: int | None = None, *, cost_model: str = "default", splits_images: bool = False) -> ShardGraph:
    """The network's graph for a batch, with costs by `cost_model`. `width` replaces the hidden width of rnnlm and transformer.

    Raises ShardError for an unknown name or model, a batch or width below 1 or beyond the limit, and a width where there is none to choose.
    """
    if name not in NETWORKS:
        raise ShardError(f"unknown graph {name!r}; choose one of {', '.join(NETWORKS)}")
    if cost_model not in COST_MODELS:
        raise ShardError(f"unknown cost model {cost_model!r}; choose one of {', '.join(COST_MODELS)}")
    if batch < 1:
        raise ShardError(f"a batch of {batch}; give 1 or more (-b)")
    for what, size, flag in (("batch", batch, "-b"), ("hidden width", width or 1, "-m")):
        if size > MOST_ITERATIONS:
            raise ShardError(f"a {what} of {size}; the limit is {MOST_ITERATIONS} ({flag})")
    build, smallest, published = NETWORKS[name]
    if width is not None and published is None:
        widths = " and ".join(n for n, (_, _, w) in NETWORKS.items() if w is not None)
        raise ShardError(f"{name} has no hidden width to set; -m is for {widths}")
    if width is not None and width < 1:
        raise ShardError(f"a hidden width of {width}; give 1 or more (-m)")
    if cost_model == "original" and splits_images:
        raise ShardError("the original cost model splits no images; leave out --halo, or choose --cost_model=default")
    rules = OriginalRules(smallest=smallest) if cost_model == "original" else Rules(splits_images=splits_images)
    layers = Layers(name, rules)
    build(layers, batch, *(() if published is None else (width or published,)))
    return layers.graph()
