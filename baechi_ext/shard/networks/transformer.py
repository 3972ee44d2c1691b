"""The Transformer (Vaswani et al., 2017), as PaSE has it: 6 + 6 layers, 8 heads, 256 steps, 50,000 words."""

from baechi_ext.errors import ShardError
from baechi_ext.shard.layers import Layers, Value

STEPS, WORDS, HEADS, BLOCKS = 256, 50_000, 8, 6


def build(layers: Layers, batch: int, width: int, blocks: int = BLOCKS) -> None:
    """Adds the network to `layers`, with this many encoder and as many decoder layers.

    Raises ShardError where the heads can't share the width.
    """
    if width % HEADS:
        raise ShardError(f"a hidden width of {width} does not divide into {HEADS} heads; choose a multiple of {HEADS}")
    net = _Transformer(layers, width)
    x = net.embedding(batch)
    for _ in range(blocks):
        x = net.feed_forward(net.residual(x, net.self_attention(x)))
    encoded, x = x, net.embedding(batch)
    for _ in range(blocks):
        x = net.residual(x, net.self_attention(x))
        x = net.feed_forward(net.residual(x, net.attention_to(x, encoded)))
    weights = Value((width, WORDS), ("features", "vocabulary"))
    layers.cross_entropy(layers.einsum("ble,ev->blv", x, weights))


class _Transformer:
    """The network's blocks."""

    def __init__(self, layers: Layers, width: int) -> None:
        self._layers = layers
        self._width = width

    def embedding(self, batch: int) -> Value:
        x = self._layers.embedding(Value((batch, STEPS), ("batch", "sequence")), WORDS, self._width)
        return self._layers.elementwise(x, Value(x.shape, x.names))

    def residual(self, x: Value, y: Value) -> Value:
        return self._layers.layer_norm(self._layers.elementwise(x, y))

    def self_attention(self, x: Value) -> Value:
        return self._attention(self._layers.einsum("ble,shek->sbhlk", x, self._projections()))

    def attention_to(self, x: Value, encoded: Value) -> Value:
        stacked = self._layers.stack([x, encoded, encoded])
        return self._attention(self._layers.einsum("sble,shek->sbhlk", stacked, self._projections()))

    def feed_forward(self, x: Value) -> Value:
        hidden = 4 * self._width
        y = self._layers.einsum("ble,ef->blf", x, Value((self._width, hidden), ("features", "hidden")), pointwise=2)
        return self.residual(x, self._layers.einsum("blf,fe->ble", y, Value((hidden, self._width), ("hidden", "features"))))

    def _projections(self) -> Value:
        return Value((3, HEADS, self._width, self._width // HEADS), ("stack", "heads", "features", "head_size"))

    def _attention(self, projected: Value) -> Value:
        query, key, value = self._layers.unstack(projected)
        key = key._replace(names=("batch", "heads", "memory", "head_size"))
        value = value._replace(names=key.names)
        weights = self._layers.softmax(self._layers.einsum("bhlk,bhmk->bhlm", query, key))
        mixed = self._layers.einsum("bhlm,bhmk->bhlk", weights, value)
        merge = Value((HEADS, self._width, self._width // HEADS), ("heads", "features", "head_size"))
        return self._layers.einsum("bhlk,hek->ble", mixed, merge)
