"""GNMT (Wu et al. 2016, arXiv 1609.08144, section 3) in the version called gnmt_v2 in Google's NMT code and in Baechi.

Encoder and decoder are stacks of recurrent layers. The lowest decoder layer's output attends to the encoder's (additive attention,
Bahdanau et al. 2015, appendix A.1.2), and what it finds is a second input of all layers above. All sequences have full length, and
the right target is fed at every step (teacher forcing). One thing is left out: the lowest layer does not see what attention found a
step earlier, as this would forbid to compute attention, and that layer, for a whole chunk of steps at once. There is no dropout, and the
loss is the mean of words, not the sum of a sentence's. With `--residual` the decoder's layers from the third on add their inputs, as in
Google's code for `gnmt`; for `uni` and `bi` that has one more, the second.

All sequences are time-major, and pass from layer to layer in chunks that are tensors of their own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from baechi_runtime.models.options.gnmt_v2 import Options
from baechi_runtime.models.torch.rnn import Recurrent, State, chunks_of, next_word_loss


def _through(layer: nn.Module, chunks: Sequence[Sequence[Tensor]], state: State, *, residual: bool) -> tuple[list[Tensor], State]:
    """The outputs of one layer for all chunks, and its last state; a residual layer adds its first input."""
    outputs, state = layer(chunks, state)
    return [y + inputs[0] for y, inputs in zip(outputs, chunks, strict=True)] if residual else outputs, state


class Encoder(nn.Module):
    """Tokens (steps, batch) -> memory (steps, batch, width), and the decoder layers' first states."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        both, rest = options.layers_of_encoder()
        units, self.chunk = options.rnn_units, options.rnn_chunk
        self.residual = options.residual
        self.width = units if rest else 2 * units
        self.embedding = nn.Embedding(options.vocab_size, units)

        def layers(inputs: Sequence[int], *, reverse: bool = False) -> nn.ModuleList:
            """One for each number of inputs."""
            return nn.ModuleList(Recurrent([units] * n, units, options.rnn_unit_type, reverse=reverse) for n in inputs)

        self.forward_layers = layers([1] * both)
        self.backward_layers = layers([1] * both, reverse=True)
        self.layers = layers([2 if both and i == 0 else 1 for i in range(rest)])

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[State]]:
        chunks = [[x] for x in chunks_of(self.embedding(tokens), self.chunk)]
        states: list[State] = []
        if self.forward_layers:
            forward, ahead = self._through_all(self.forward_layers, chunks)
            backward, behind = self._through_all(self.backward_layers, chunks)
            chunks = [f + b for f, b in zip(forward, backward, strict=True)]
            states = behind if self.layers else [state for pair in zip(ahead, behind, strict=True) for state in pair]
        chunks, above = self._through_all(self.layers, chunks)
        return torch.cat([torch.cat(parts) for parts in zip(*chunks, strict=True)], dim=-1), states + above

    def _through_all(self, layers: nn.ModuleList, chunks: list[list[Tensor]]) -> tuple[list[list[Tensor]], list[State]]:
        """Outputs of a stack of layers, as inputs of the next one, and the last state of each."""
        states = []
        for i, layer in enumerate(layers):
            outputs, state = _through(layer, chunks, (), residual=self.residual and i > 0)
            chunks = [[y] for y in outputs]
            states.append(state)
        return chunks, states


class AdditiveAttention(nn.Module):
    """score = v . tanh(W query + U memory), a softmax over the memory's steps, and the weighted mean of the memory."""

    def __init__(self, units: int, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(units, units, bias=False)
        self.memory = nn.Linear(width, units, bias=False)
        self.v = nn.Parameter(torch.empty(units).uniform_(-(units**-0.5), units**-0.5))

    def keys(self, memory: Tensor) -> Tensor:
        """U memory, (steps, batch, units): the same for all queries."""
        return self.memory(memory)

    def forward(self, queries: Tensor, keys: Tensor, memory: Tensor) -> Tensor:
        """Queries (targets, batch, units) -> contexts (targets, batch, width)."""
        scores = torch.tanh(self.query(queries).unsqueeze(1) + keys) @ self.v
        weights = scores.softmax(dim=1).permute(2, 0, 1)
        return torch.bmm(weights, memory.transpose(0, 1)).transpose(0, 1)


class Decoder(nn.Module):
    """Tokens (steps, batch) with the encoder's memory and states -> outputs (steps, batch, units) in chunks."""

    def __init__(self, options: Options, width: int) -> None:
        super().__init__()
        units, self.chunk = options.rnn_units, options.rnn_chunk
        self.residual = options.residual
        self.embedding = nn.Embedding(options.vocab_size, units)
        sizes = [[units]] + [[units, width]] * (options.num_layers - 1)
        self.layers = nn.ModuleList(Recurrent(s, units, options.rnn_unit_type) for s in sizes)
        self.attention = AdditiveAttention(units, width) if options.num_layers > 1 else None

    def forward(self, tokens: Tensor, memory: Tensor, states: Sequence[State]) -> list[Tensor]:
        lowest, *upper = self.layers
        keys = None if self.attention is None else self.attention.keys(memory)
        chunks = [[x] for x in chunks_of(self.embedding(tokens), self.chunk)]
        outputs, _ = _through(lowest, chunks, states[0], residual=False)
        contexts = [] if self.attention is None else [self.attention(y, keys, memory) for y in outputs]
        for i, (layer, state) in enumerate(zip(upper, states[1:], strict=True), start=1):
            pairs = list(zip(outputs, contexts, strict=True))
            outputs, _ = _through(layer, pairs, state, residual=self.residual and i > 1)
        return outputs


class GnmtV2(nn.Module):
    """Source (steps, batch) and target (steps + 1, batch) tokens -> the mean cross-entropy of a target's next token."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.encoder = Encoder(options)
        self.decoder = Decoder(options, self.encoder.width)
        self.projection = nn.Linear(options.rnn_units, options.vocab_size, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, states = self.encoder(source)
        outputs = self.decoder(target[:-1], memory, states)
        return next_word_loss(map(self.projection, outputs), target[1:], self.options.rnn_chunk)

    def expert_device(self, parameter: str) -> int:
        """Where Baechi's experts put a parameter's ops: layer i of encoder and decoder on device i, taken modulo their number.

        Embeddings and attention stand with the lowest layers, the projection with the highest or, where there are more devices
        than layers, on the next device.
        """
        part, _, rest = parameter.partition(".")
        if part == "projection":
            layers = self.options.num_layers
            return layers if layers < self.options.num_devices else layers - 1
        kind, _, rest = rest.partition(".")
        if not kind.endswith("layers"):
            return 0
        below = len(self.encoder.forward_layers) if (part, kind) == ("encoder", "layers") else 0
        return below + int(rest.partition(".")[0])


def build(options: Options) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model, which returns its loss, and random tokens."""
    model = GnmtV2(options)
    steps, batch = options.max_seq_length, options.batch_size
    return model, tuple(torch.randint(options.vocab_size, (n, batch)) for n in (steps, steps + 1))
