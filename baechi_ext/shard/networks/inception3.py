"""Inception-V3 (Szegedy et al., 2016), as PaSE has it: images of 299 pixels, 1000 classes, no auxiliary classifier."""

from baechi_ext.shard.layers import IMAGE, Layers, Value

SEVEN_BY_ONE, ONE_BY_SEVEN = (7, 1), (1, 7)


def build(layers: Layers, batch: int) -> None:
    """Adds the network to `layers`."""
    net = _Inception(layers)
    x = Value((batch, 3, 299, 299), IMAGE)
    x = net.convolution(net.convolution(net.convolution(x, 32, (3, 3), 2), 32, (3, 3)), 64, (3, 3), same=True)
    x = layers.pooling(x, (3, 3), 2)
    x = net.convolution(net.convolution(x, 80, (1, 1)), 192, (3, 3))
    x = layers.pooling(x, (3, 3), 2)
    for pooled in (32, 64, 64):
        x = net.module_a(x, pooled)
    x = net.module_b(x)
    for inner in (128, 160, 160, 192):
        x = net.module_c(x, inner)
    x = net.module_e(net.module_e(net.module_d(x)))
    layers.cross_entropy(layers.linear(layers.mean(x, (2, 3)), 1000, "units"))


class _Inception:
    """The network's modules; each is named as in the paper's reference implementation."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    def convolution(self, x: Value, channels: int, window: tuple[int, int], stride: int = 1, *, same: bool = False) -> Value:
        """A convolution with its batch normalization; `same`: padded, so that the image keeps its size."""
        pad = (window[0] // 2, window[1] // 2) if same else (0, 0)
        return self._layers.batch_norm(self._layers.convolution(x, channels, window, stride, pad))

    def chain(self, x: Value, *convolutions: tuple[int, tuple[int, int]]) -> Value:
        """Padded convolutions one after the other."""
        for channels, window in convolutions:
            x = self.convolution(x, channels, window, same=True)
        return x

    def pooled(self, x: Value, channels: int) -> Value:
        return self.convolution(self._layers.pooling(x, (3, 3), 1, pad=(1, 1)), channels, (1, 1))

    def module_a(self, x: Value, pooled: int) -> Value:
        parts = [
            self.chain(x, (64, (1, 1))),
            self.chain(x, (48, (1, 1)), (64, (5, 5))),
            self.chain(x, (64, (1, 1)), (96, (3, 3)), (96, (3, 3))),
            self.pooled(x, pooled),
        ]
        return self._layers.concat(parts, 1)

    def module_b(self, x: Value) -> Value:
        parts = [
            self.convolution(x, 384, (3, 3), 2),
            self.convolution(self.chain(x, (64, (1, 1)), (96, (3, 3))), 96, (3, 3), 2),
            self._layers.pooling(x, (3, 3), 2),
        ]
        return self._layers.concat(parts, 1)

    def module_c(self, x: Value, inner: int) -> Value:
        once = (inner, SEVEN_BY_ONE), (inner, ONE_BY_SEVEN)
        parts = [
            self.chain(x, (192, (1, 1))),
            self.chain(x, (inner, (1, 1)), (inner, ONE_BY_SEVEN), (192, SEVEN_BY_ONE)),
            self.chain(x, (inner, (1, 1)), *once, (inner, SEVEN_BY_ONE), (192, ONE_BY_SEVEN)),
            self.pooled(x, 192),
        ]
        return self._layers.concat(parts, 1)

    def module_d(self, x: Value) -> Value:
        parts = [
            self.convolution(self.chain(x, (192, (1, 1))), 320, (3, 3), 2),
            self.convolution(self.chain(x, (192, (1, 1)), (192, ONE_BY_SEVEN), (192, SEVEN_BY_ONE)), 192, (3, 3), 2),
            self._layers.pooling(x, (3, 3), 2),
        ]
        return self._layers.concat(parts, 1)

    def module_e(self, x: Value) -> Value:
        first = self.chain(x, (320, (1, 1)))
        second = self._fork(self.chain(x, (384, (1, 1))))
        third = self._fork(self.chain(x, (448, (1, 1)), (384, (3, 3))))
        return self._layers.concat([first, second, third, self.pooled(x, 192)], 1)

    def _fork(self, x: Value) -> Value:
        return self._layers.concat([self.chain(x, (384, (1, 3))), self.chain(x, (384, (3, 1)))], 1)
