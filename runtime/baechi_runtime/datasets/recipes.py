"""Recipes that the families of baechi_ext.datasets are drawn from. The same seed gives the same architectures and split."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from torch import Tensor, nn

from baechi_ext.datasets.families import SPLITS
from baechi_ext.errors import OptionError
from baechi_runtime.models.options.gnmt_v2 import Options as GnmtOptions
from baechi_runtime.models.torch import enas_cnn, enas_rnn, gnmt_v2
from baechi_runtime.models.training_step import WithLoss

MACRO_EVERY = 4
Built = tuple[nn.Module, tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Sizes that differ among the graphs of nmt: the steps of all sequences, and the number of sequences at once."""

    max_seq_length: int
    batch_size: int

    @classmethod
    def sample(cls, draw: Random) -> "Lengths":
        return cls(draw.randrange(8, 41, 2), draw.choice((16, 24, 32, 48, 64)))


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe for the graphs of a family."""

    text: str
    optimizer: str
    sample: Callable[[Random, int], Any]
    """Draws the architecture (a dataclass) of the graph of this number."""
    build: Callable[[Any], Built]
    """The model of an architecture, which returns its loss, and its inputs; both are drawn by torch."""


def _sample_network(draw: Random, number: int) -> enas_cnn.Macro | enas_cnn.Micro:
    return (enas_cnn.Micro if number % MACRO_EVERY else enas_cnn.Macro).sample(draw)


def build_network(layout: enas_cnn.Macro | enas_cnn.Micro, sizes: enas_cnn.Sizes = enas_cnn.Sizes()) -> Built:  # noqa: B008 - frozen
    """A network of cifar10 with its loss."""
    module, inputs = enas_cnn.build(layout, sizes)
    return WithLoss(module), inputs


NMT = GnmtOptions(vocab_size=2000, rnn_units=256, num_layers=2, rnn_chunk=2, num_devices=3)


def build_translator(lengths: Lengths, options: GnmtOptions = NMT) -> Built:
    """A model of nmt."""
    return gnmt_v2.build(replace(options, **asdict(lengths)))


RECIPES: dict[str, Recipe] = {
    "cifar10": Recipe(
        f"ENAS (arXiv 1802.03268): every {MACRO_EVERY}th network from the macro space (6 to 12 layers of 6 ops, skip connections at rate "
        f"{enas_cnn.SKIP_RATE}), the others from the micro space (two cells of 5 blocks of 5 ops, 1 or 2 normal cells a stage)",
        "momentum",
        _sample_network,
        build_network,
    ),
    "ptb": Recipe(
        "ENAS (arXiv 1802.03268): recurrent cells of 12 nodes of 4 activations, each step of ops of its own",
        "sgd",
        lambda draw, number: enas_rnn.Cell.sample(draw),
        enas_rnn.build,
    ),
    "nmt": Recipe(
        "gnmt_v2 of 2 layers and 256 units with lengths 8 to 40 and batches 16 to 64, 2 time steps an op",
        "adam",
        lambda draw, number: Lengths.sample(draw),
        build_translator,
    ),
}
"""Family -> recipe."""


def architectures(family: str, graphs: int, seed: int) -> list[Any]:
    """The first `graphs` architectures of a family, all different. Raises OptionError where there are fewer."""
    draw = Random(f"{family} {seed}")
    found: dict[Any, None] = {}
    for _ in range(100 * graphs):
        if len(found) == graphs:
            return list(found)
        found[RECIPES[family].sample(draw, len(found))] = None
    raise OptionError(f"--graphs={graphs} is more than the family {family} has different graphs; give a smaller number")


def splits(family: str, graphs: int, seed: int) -> list[str]:
    """One half of the graphs, drawn at random, is for training and the other for testing."""
    order = list(range(graphs))
    Random(f"{family} {seed} split").shuffle(order)
    train = set(order[: graphs // 2])
    return [SPLITS[i not in train] for i in range(graphs)]
