"""Layers with habits of their own: recurrent, attention, sparse, spectral, scripted, ops with shapes that depend on data."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from benchmarks.hostile.suite import Net, Wrap, batches, case, seeded, sgd, state, train, updates


class Recurrent(nn.Module):
    """Reads the 16 numbers as 4 steps of 4."""

    def __init__(self, kind: Any = nn.LSTM) -> None:
        super().__init__()
        self.cells = kind(4, 24, num_layers=2, dropout=0.1, batch_first=True)
        self.last = nn.Linear(24, 4)

    def forward(self, x: Tensor, carried: Any = None) -> Any:
        out, carried = self.cells(x.view(-1, 4, 4), carried)
        return self.last(out[:, -1]), carried


def carried_over(wrap: Wrap, model: nn.Module, detach: Any) -> Any:
    model = wrap(model)
    carried, losses = None, []
    for step, (x, y) in enumerate(updates(model, steps=5)):
        out, carried = model(x, carried)
        loss = F.cross_entropy(out, y)
        loss.backward()
        carried = None if step == 2 else detach(carried)
        losses.append(loss.detach())
    return losses, carried, state(model)


def lstm_carries_its_state(wrap: Wrap) -> Any:
    return carried_over(wrap, seeded(Recurrent, nn.LSTM), lambda pair: tuple(part.detach() for part in pair))


def gru_carries_its_state(wrap: Wrap) -> Any:
    return carried_over(wrap, seeded(Recurrent, nn.GRU), Tensor.detach)


def rnn_carries_its_state(wrap: Wrap) -> Any:
    return carried_over(wrap, seeded(Recurrent, nn.RNN), Tensor.detach)


@case
class CellIsUnrolledByData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTMCell(16, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x.new_zeros(len(x), 24), x.new_zeros(len(x), 24))
        for _ in range(1 + int(x[0, 0].abs() * 3)):
            hidden = self.cell(x, hidden)
        return self.last(hidden[0])


def sequences_are_packed(wrap: Wrap) -> Any:
    class Packed(Recurrent):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x.view(-1, 4, 4), lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(self.cells(packed)[0], batch_first=True)
            return self.last(out.sum(1))

    model = wrap(seeded(Packed))
    optimizer = sgd(model)
    for step, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        F.cross_entropy(model(x, 1 + (torch.arange(8) + step) % 4), y).backward()
        optimizer.step()
    return state(model)


def packed_sequence_as_input(wrap: Wrap) -> Any:
    class Packed(Recurrent):
        def forward(self, packed: Any) -> Tensor:
            return self.last(self.cells(packed)[1][0][-1])

    model = wrap(seeded(Packed))
    for x, y in batches(3):
        parts = pack_sequence([row.view(4, 4)[: 1 + i % 4] for i, row in enumerate(x)], enforce_sorted=False)
        F.cross_entropy(model(parts), y).backward()
    return state(model)


def encoder_with_changing_masks(wrap: Wrap) -> Any:
    class Encoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 32, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.last = nn.Linear(8, 4)

        def forward(self, x: Tensor, mask: Any = None, padding: Any = None) -> Tensor:
            return self.last(self.encoder(x.view(-1, 2, 8), mask=mask, src_key_padding_mask=padding).mean(1))

    model = wrap(seeded(Encoding))
    causal = nn.Transformer.generate_square_subsequent_mask(2)
    kinds = [{}, {"mask": causal}, {"padding": torch.arange(16).view(8, 2) % 5 == 1}, {}]
    for (x, y), masks in zip(updates(model, steps=4), kinds, strict=True):
        F.cross_entropy(model(x, **masks), y).backward()
    return state(model), model.eval()(torch.ones(2, 16)).detach()


@case(lambda given, model: (train(model, {3: lambda: setattr(given, "averaged", False)}), given.seen))
class WeightsOfAttentionAreReturned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True), nn.Linear(16, 4)
        self.seen: list[Tensor] = []
        self.averaged = True

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, -1, 16)
        out, weights = self.attention(x, x, x, average_attn_weights=self.averaged)
        self.seen.append(weights.detach())
        return self.last(out).view(-1, 4)


@case(lambda given, model: train(model, {3: lambda: setattr(given, "causal", True)}))
class CausalAttentionIsSwitched(Net):
    causal = False

    def hidden(self, x: Tensor) -> Tensor:
        heads = self.first(x).view(1, 4, -1, 8)
        return self.second(F.scaled_dot_product_attention(heads, heads, heads, is_causal=self.causal).reshape(-1, 32))


def sparse_gradients_of_an_embedding(wrap: Wrap) -> Any:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(100, 16, sparse=True, padding_idx=0), nn.Linear(16, 4)

        def forward(self, index: Tensor) -> Tensor:
            return self.last(self.table(index).mean(1))

    model = wrap(seeded(Looking))
    optimizers = [torch.optim.SparseAdam([model.table.weight]), torch.optim.Adagrad(model.last.parameters())]
    grads = []
    for step, (_, y) in enumerate(batches()):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model((torch.arange(24).view(8, 3) * (step + 1)) % 100), y).backward()
        grads.append(model.table.weight.grad.is_sparse)
        for optimizer in optimizers:
            optimizer.step()
    return grads, {name: p.detach().clone() for name, p in model.named_parameters()}


@case
class EmbeddingWithALimitedNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16, max_norm=1.0)
        self.bag = nn.EmbeddingBag(50, 16, mode="max")

    def forward(self, x: Tensor) -> Tensor:
        index = (x.abs() * 20).long().clamp(max=49)
        return super().forward(self.table(index[:, 0]) + self.bag(index))


@case
class LayerIsScripted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.jit.script(nn.Sequential(nn.Linear(32, 32), nn.Tanh()))

    def hidden(self, x: Tensor) -> Tensor:
        return self.part(super().hidden(x))


@case
class LayerIsCompiledByTheUser(Net):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.compile(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), backend="eager")

    def hidden(self, x: Tensor) -> Tensor:
        return self.part(super().hidden(x))


@case(lambda given, model: (train(model), given.calls))
class CompilingIsForbiddenForAPart(Net):
    calls = 0

    @torch.compiler.disable
    def hidden(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().hidden(x) / self.calls


@case
class AsksWhetherItIsCompiled(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if torch.jit.is_scripting() or torch.jit.is_tracing() else out * 2


@case
class RowsAreChosenByValue(Net):
    def hidden(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero().squeeze(1)
        hidden = super().hidden(x)
        return hidden.index_add(0, rows, self.second(hidden[rows])) + torch.masked_select(x, x > 0).mean()


@case(lambda given, model: (train(model), given.seen))
class UniqueValuesAreCounted(Net):
    seen: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        kinds, where, count = torch.unique((x[:, 0] * 2).round(), return_inverse=True, return_counts=True)
        self.seen = (*self.seen, len(kinds))
        return super().forward(x) * count[where, None] + sum(k * 0.1 for k in kinds.tolist())


@case(lambda given, model: (train(model), given.load))
class ExpertsGetWhatIsRoutedToThem(Net):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 32) for _ in range(3))
        self.load: list[list[int]] = []

    def hidden(self, x: Tensor) -> Tensor:
        weight, chosen = torch.softmax(self.gate(x), 1).max(1)
        out = x.new_zeros(len(x), 32)
        for i, expert in enumerate(self.experts):
            rows = torch.where(chosen == i)[0]
            if len(rows):
                out[rows] = expert(x[rows])
        self.load.append(torch.bincount(chosen, minlength=3).tolist())
        return torch.relu(self.second(out * weight[:, None]))


def tree_of_words(wrap: Wrap) -> Any:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.join, self.last = nn.Embedding(20, 16), nn.Linear(32, 16), nn.Linear(16, 4)

        def encode(self, tree: Any) -> Tensor:
            if isinstance(tree, int):
                return self.words(torch.tensor([tree]))
            return torch.tanh(self.join(torch.cat([self.encode(tree[0]), self.encode(tree[1])], 1)))

        def forward(self, tree: Any) -> Tensor:
            return self.last(self.encode(tree))

    model = wrap(seeded(Tree))
    optimizer = sgd(model)
    losses = []
    for tree in ((1, 2), ((1, 2), 3), 4, ((5, (6, 7)), (8, 9)), (1, 2), (3, (2, 1))):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tree), torch.tensor([1]))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, state(model)


@case
class AutoencoderSamples(Net):
    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.hidden(x).chunk(2, 1)
        return self.last(torch.cat([mean + torch.randn_like(spread) * (0.5 * spread).exp(), spread], 1))


@case
class UnpoolingByIndices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(1, 16, 3, padding=1), nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        pooled, where = F.max_pool2d(self.conv(x.view(-1, 1, 4, 4)), 2, return_indices=True)
        return self.last(F.max_unpool2d(pooled, where, 2).flatten(1))


def loss_of_alignments(model: Net) -> Any:
    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        logits = torch.log_softmax(out.view(4, 2, 4), 2)
        return F.ctc_loss(logits, 1 + y.view(2, 4)[:, :2] % 3, torch.tensor([4, 4]), torch.tensor([2, 1]), zero_infinity=True)

    return train(model, loss_of=loss_of)


@torch.library.custom_op("hostile_loops::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    CALLS.append(x.numel())
    return x * 0.5


CALLS: list[int] = []
halve.register_fake(torch.empty_like)
halve.register_autograd(lambda ctx, grad: grad * 0.5)


def op_of_the_user_with_side_effects(wrap: Wrap) -> Any:
    class Using(Net):
        def hidden(self, x: Tensor) -> Tensor:
            return halve(super().hidden(x))

    found = train(wrap(seeded(Using)))
    return found, CALLS[-6:]
