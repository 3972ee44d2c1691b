"""Networks drawn from the search spaces of ENAS: what is drawn, how it is wired, and that it learns."""

from random import Random

import pytest
import torch
from torch import nn

from baechi_ext.capture.torch_joint import CaptureOptions, capture_joint
from baechi_runtime.models.torch import enas_cnn, enas_rnn
from baechi_runtime.models.torch.cells import Grid, Halve
from baechi_runtime.models.torch.enas_cnn import Block, Macro, MacroNetwork, Micro, SearchedCell
from baechi_runtime.models.training_step import EagerStep, TrainingStep, WithLoss, optimizer_spec

pytestmark = pytest.mark.usefixtures("one_thread")

CNN = enas_cnn.Sizes(batch_size=8, image_size=8, filters=4)
RNN = enas_rnn.Sizes(batch_size=4, steps=3, units=8, vocab_size=12, chunk=2)
SPACES = {
    "macro": (Macro.sample, lambda layout: enas_cnn.build(layout, CNN)),
    "micro": (Micro.sample, lambda layout: enas_cnn.build(layout, CNN)),
    "cell": (enas_rnn.Cell.sample, lambda cell: enas_rnn.build(cell, RNN)),
}


def built(space: str, seed: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A drawn model with its loss, and inputs."""
    sample, build = SPACES[space]
    torch.manual_seed(seed)
    module, inputs = build(sample(Random(seed)))
    return (module if space == "cell" else WithLoss(module)), inputs


@pytest.mark.parametrize("space", SPACES)
def test_drawing(space: str) -> None:
    sample = SPACES[space][0]
    drawn = [sample(Random(seed)) for seed in range(50)]
    assert drawn == [sample(Random(seed)) for seed in range(50)]
    assert len(set(drawn)) == 50


def test_what_is_drawn_lies_in_the_spaces() -> None:
    macros = [Macro.sample(Random(seed)) for seed in range(200)]
    assert {len(m.ops) for m in macros} == set(range(6, 13))
    assert {op for m in macros for op in m.ops} == set(enas_cnn.MACRO_OPS)
    assert all(j < i for m in macros for i, skips in enumerate(m.skips) for j in skips)
    possible = sum(len(m.ops) * (len(m.ops) - 1) // 2 for m in macros)
    assert sum(len(s) for m in macros for s in m.skips) / possible == pytest.approx(enas_cnn.SKIP_RATE, abs=0.02)
    cells = [cell for seed in range(100) for m in (Micro.sample(Random(seed)),) for cell in (m.normal, m.reduction)]
    assert {op for cell in cells for block in cell for op in block.ops} == set(enas_cnn.MICRO_OPS)
    for cell in cells:
        assert len(cell) == 5
        assert all(node < k + 2 for k, block in enumerate(cell) for node in block.reads)
    trees = [enas_rnn.Cell.sample(Random(seed)) for seed in range(100)]
    assert {a for tree in trees for a in tree.activations} == set(enas_rnn.ACTIVATIONS)
    assert all(len(tree.reads) == 12 and all(r < k for k, r in enumerate(tree.reads)) for tree in trees)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("seed", range(3))
def test_every_parameter_learns(space: str, seed: int) -> None:
    """No part of a drawn network is read by nobody."""
    module, inputs = built(space, seed)
    module(*inputs).backward()
    assert [name for name, p in module.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(("space", "rate"), [("macro", 0.01), ("micro", 0.01), ("cell", 0.03)])
def test_the_loss_falls(space: str, rate: float) -> None:
    module, inputs = built(space, 1)
    step = EagerStep(TrainingStep(space, module, inputs, optimizer_spec("adam", rate)), torch.device("cpu"))
    losses = [step.run().item() for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("space", [pytest.param(space, marks=[pytest.mark.slow] if space == "micro" else []) for space in SPACES])
def test_the_same_seed_gives_the_same_graph(space: str) -> None:
    first, second = (capture_joint(*built(space, 2), CaptureOptions(), space)[0] for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert {op.phase for op in first.ops} == {"forward", "backward", "update"}


def test_skips_are_halved_once_and_only_where_they_are_read() -> None:
    """Layers 0 and 1 are of the first stage, 2 and 3 of the second, 4 and 5 of the third; both readers of layer 0 share its halves."""
    layout = Macro(("max3",) * 6, ((), (0,), (0,), (), (0,), (4,)))
    network = MacroNetwork(layout, 4)
    assert [layout.stage(i) for i in range(6)] == [0, 0, 1, 1, 2, 2]
    assert set(network.halves) == {"0_0", "0_1", "1_0", "3_1"}
    assert all(isinstance(half, Halve) for half in network.halves.values())
    assert [layer.join is not None for layer in network.layers] == [False, True, True, False, True, True]
    assert network(torch.randn(2, 3, 8, 8)).shape == (2, 10)


def test_a_cell_is_wired_as_it_says() -> None:
    """Blocks 3 and 4 are read by nobody: the output is the two, of 4 channels each."""
    same = ("identity", "identity")
    cell = (Block((0, 1), same), Block((0, 0), same), Block((2, 3), same), Block((4, 1), same), Block((4, 4), same))
    searched = SearchedCell(cell, (Grid(4, 0), Grid(4, 0)), 4, reduction=False)
    searched.current = searched.previous = nn.Identity()
    x, y = torch.randn(2, 4, 6, 6), torch.randn(2, 4, 6, 6)
    third = (x + y) + (x + x)
    assert torch.equal(searched(x, y), torch.cat([third + y, third + third], dim=1))
    assert searched.output == Grid(8, 0)


def test_a_reduction_cell_halves_what_it_reads() -> None:
    cell = Micro.sample(Random(0)).reduction
    searched = SearchedCell(cell, (Grid(4, 0), Grid(6, 0)), 8, reduction=True)
    x = searched(torch.randn(2, 4, 8, 8), torch.randn(2, 6, 8, 8))
    assert x.shape == (2, searched.output.channels, 4, 4)
    assert searched.output.halvings == 1


def test_the_recurrent_cell_computes_what_the_paper_says() -> None:
    """Equations of appendix A: node by node, with the two halves of each weight apart."""
    torch.manual_seed(0)
    tree = enas_rnn.Cell((-1, 0, 0, 1), ("tanh", "relu", "identity", "sigmoid"))
    model = enas_rnn.LanguageModel(tree, RNN)
    word, state = torch.randn(4, 8), torch.randn(4, 8)
    gates, values = zip(*(linear.weight.chunk(2) for linear in (model.word, *model.nodes)), strict=True)

    def node(x: torch.Tensor, k: int, f: str, extra: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        c = torch.sigmoid(x @ gates[k + 1].T + extra[0])
        return c * enas_rnn.ACTIVATIONS[f](x @ values[k + 1].T + extra[1]) + (1 - c) * x

    none = (torch.zeros(()), torch.zeros(()))
    first = node(state, 0, "tanh", (word @ gates[0].T, word @ values[0].T))
    second, third = node(first, 1, "relu", none), node(first, 2, "identity", none)
    fourth = node(second, 3, "sigmoid", none)
    assert tree.leaves == (2, 3)
    torch.testing.assert_close(model._step(model.word(word), state), (third + fourth) / 2)


def test_the_language_model_ties_its_weights() -> None:
    model, (words,) = enas_rnn.build(enas_rnn.Cell.sample(Random(0)), RNN)
    assert model.projection.weight is model.embedding.weight
    assert words.shape == (4, 4)
    wanted = words[1:].flatten()
    assert model(words).item() == pytest.approx(torch.log(torch.tensor(12.0)).item(), rel=0.3)
    assert wanted.numel() == 12
