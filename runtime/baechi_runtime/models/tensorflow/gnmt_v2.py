"""GNMT (Wu et al. 2016, arXiv 1609.08144, section 3) in the version called gnmt_v2 in Google's NMT code and in Baechi.

The same network as the one for PyTorch, with the same flags: stacks of recurrent layers, additive attention (Bahdanau et al. 2015,
appendix A.1.2) of the lowest decoder layer's output, which is a second input of all layers above; teacher forcing, and no attention fed
back to the lowest layer, no dropout, the mean loss of words; residual layers of the decoder as there. All sequences are time-major, and
pass from layer to layer in chunks that are tensors of their own.
"""

import re
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from baechi_ext.errors import OptionError
from baechi_runtime.models.options.gnmt_v2 import Options
from baechi_runtime.models.tensorflow.recurrent import UNIT_TYPES, Linear, Recurrent, State, uniform


def _chunks(sequence: tf.Tensor, chunk: int) -> list[tf.Tensor]:
    """The sequence in parts of `chunk` steps; the last part may be shorter."""
    steps = sequence.shape[0]
    return tf.split(sequence, [min(chunk, steps - start) for start in range(0, steps, chunk)])


class Embedding(tf.Module):
    """Tokens -> rows of a table."""

    def __init__(self, words: int, units: int) -> None:
        super().__init__("embedding")
        with self.name_scope:
            self.table = uniform((words, units), 3**0.5, "table")

    @tf.Module.with_name_scope
    def __call__(self, tokens: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.table, tokens)


class Encoder(tf.Module):
    """Tokens (steps, batch) -> memory (steps, batch, width), and the decoder layers' first states."""

    def __init__(self, options: Options) -> None:
        super().__init__("encoder")
        both, rest = options.layers_of_encoder()
        units, unit_type = options.rnn_units, options.rnn_unit_type
        self.chunk, self.residual = options.rnn_chunk, options.residual
        self.width = units if rest else 2 * units
        with self.name_scope:
            self.embedding = Embedding(options.vocab_size, units)
            self.forward_layers = [Recurrent(units, units, unit_type, f"forward_layers_{i}") for i in range(both)]
            self.backward_layers = [Recurrent(units, units, unit_type, f"backward_layers_{i}", reverse=True) for i in range(both)]
            sizes = [2 * units if both and i == 0 else units for i in range(rest)]
            self.layers = [Recurrent(size, units, unit_type, f"layers_{i}") for i, size in enumerate(sizes)]

    @tf.Module.with_name_scope
    def __call__(self, tokens: tf.Tensor) -> tuple[tf.Tensor, list[State]]:
        chunks = _chunks(self.embedding(tokens), self.chunk)
        states: list[State] = []
        if self.forward_layers:
            forward, ahead = self._through(self.forward_layers, chunks)
            backward, behind = self._through(self.backward_layers, chunks)
            chunks = [tf.concat(pair, axis=-1) for pair in zip(forward, backward, strict=True)]
            states = behind if self.layers else [state for pair in zip(ahead, behind, strict=True) for state in pair]
        chunks, above = self._through(self.layers, chunks)
        return tf.concat(chunks, axis=0), states + above

    def _through(self, layers: Sequence[Recurrent], chunks: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[State]]:
        """Outputs of a stack of layers, and the last state of each; a residual layer adds its input."""
        states = []
        for i, layer in enumerate(layers):
            outputs, state = layer(chunks)
            residual = self.residual and i > 0
            chunks = [y + x for y, x in zip(outputs, chunks, strict=True)] if residual else outputs
            states.append(state)
        return chunks, states


class AdditiveAttention(tf.Module):
    """score = v . tanh(W query + U memory), a softmax over the memory's steps, and the weighted mean of the memory."""

    def __init__(self, units: int, width: int) -> None:
        super().__init__("attention")
        with self.name_scope:
            self.query = Linear(units, units, "query")
            self.memory = Linear(width, units, "memory")
            self.v = uniform((units, 1), units**-0.5, "v")

    @tf.Module.with_name_scope
    def keys(self, memory: tf.Tensor) -> tf.Tensor:
        """U memory, (steps, batch, units): the same for all queries."""
        return self.memory(memory)

    @tf.Module.with_name_scope
    def __call__(self, queries: tf.Tensor, keys: tf.Tensor, memory: tf.Tensor) -> tf.Tensor:
        """Queries (targets, batch, units) -> contexts (targets, batch, width)."""
        targets, batch, units = queries.shape
        steps = keys.shape[0]
        sums = tf.tanh(self.query(queries)[:, None] + keys[None])
        scores = tf.reshape(tf.reshape(sums, (targets * steps * batch, units)) @ self.v, (targets, steps, batch))
        weights = tf.transpose(tf.nn.softmax(scores, axis=1), (2, 0, 1))
        return tf.transpose(weights @ tf.transpose(memory, (1, 0, 2)), (1, 0, 2))


class Decoder(tf.Module):
    """Tokens (steps, batch) with the encoder's memory and states -> outputs (steps, batch, units) in chunks."""

    def __init__(self, options: Options, width: int) -> None:
        super().__init__("decoder")
        units, unit_type = options.rnn_units, options.rnn_unit_type
        self.chunk, self.residual = options.rnn_chunk, options.residual
        with self.name_scope:
            self.embedding = Embedding(options.vocab_size, units)
            sizes = [units] + [units + width] * (options.num_layers - 1)
            self.layers = [Recurrent(size, units, unit_type, f"layers_{i}") for i, size in enumerate(sizes)]
            self.attention = AdditiveAttention(units, width) if options.num_layers > 1 else None

    @tf.Module.with_name_scope
    def __call__(self, tokens: tf.Tensor, memory: tf.Tensor, states: Sequence[State]) -> list[tf.Tensor]:
        lowest, *upper = self.layers
        outputs, _ = lowest(_chunks(self.embedding(tokens), self.chunk), states[0])
        if not upper or self.attention is None:
            return outputs
        keys = self.attention.keys(memory)
        contexts = [self.attention(y, keys, memory) for y in outputs]
        for i, (layer, state) in enumerate(zip(upper, states[1:], strict=True), start=1):
            below = outputs
            outputs, _ = layer([tf.concat(pair, axis=-1) for pair in zip(below, contexts, strict=True)], state)
            if self.residual and i > 1:
                outputs = [y + x for y, x in zip(outputs, below, strict=True)]
        return outputs


class GnmtV2(tf.Module):
    """Source (steps, batch) and target (steps + 1, batch) tokens -> the mean cross-entropy of a target's next token."""

    def __init__(self, options: Options) -> None:
        super().__init__("gnmt_v2")
        self.options = options
        self.encoder = Encoder(options)
        self.decoder = Decoder(options, self.encoder.width)
        self.projection = Linear(options.rnn_units, options.vocab_size, "projection")

    def __call__(self, source: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
        memory, states = self.encoder(source)
        outputs = self.decoder(target[:-1], memory, states)
        labels = _chunks(target[1:], self.options.rnn_chunk)
        with tf.name_scope("projection"):
            losses = [
                tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(wanted, self.projection(y)))
                for y, wanted in zip(outputs, labels, strict=True)
            ]
            return tf.add_n(losses) / float(np.prod(target[1:].shape))

    def expert_device(self, name: str) -> int | None:
        """Where Baechi's experts put a variable or op of that name: layer i of encoder and decoder on device i, taken modulo their number.

        Embeddings and attention stand with the lowest layers, the projection with the highest or, where there are more devices
        than layers, on the next device.
        """
        if re.search(r"(^|/)projection", name):
            layers = self.options.num_layers
            return layers if layers < self.options.num_devices else layers - 1
        if found := re.search(r"(encoder|decoder)/(forward_|backward_|)layers_(\d+)", name):
            above = len(self.encoder.forward_layers) if found[1] == "encoder" and not found[2] else 0
            return above + int(found[3])
        return 0 if re.search(r"(^|/)(encoder|decoder)/", name) else None


def build(options: Options) -> tuple[GnmtV2, tuple[np.ndarray, ...]]:
    """The model, which returns its loss, and random tokens. Raises OptionError for sizes that do not go together."""
    if options.rnn_unit_type not in UNIT_TYPES:
        raise OptionError(f"--rnn_unit_type={options.rnn_unit_type} is unknown; choose one of {', '.join(UNIT_TYPES)}")
    steps, batch = options.max_seq_length, options.batch_size
    tokens = [np.random.randint(options.vocab_size, size=(n, batch), dtype=np.int32) for n in (steps, steps + 1)]
    return GnmtV2(options), tuple(tokens)
