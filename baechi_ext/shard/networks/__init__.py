"""The networks that `baechi pase` knows by name, built layer by layer."""

from collections.abc import Callable
from importlib import import_module

from baechi_ext.errors import ShardError
from baechi_ext.shard.graph import MOST_ITERATIONS, ShardGraph
from baechi_ext.shard.layers import Layers
from baechi_ext.shard.rules import Rules
from baechi_ext.shard.rules_original import OriginalRules

NETWORKS = {
    "alexnet": ("alexnet", 4, None),
    "resnet101": ("resnet101", 4, None),
    "inception3": ("inception3", 4, None),
    "rnnlm": ("rnnlm", 1, 2048),
    "transformer": ("transformer", 1, 512),
    "densenet121": ("densenet", 4, None),
}
"""Name -> module, the original's least share of an axis, and the published hidden width where it can be chosen."""
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
    module, smallest, published = NETWORKS[name]
    if width is not None and published is None:
        widths = " and ".join(n for n, (_, _, w) in NETWORKS.items() if w is not None)
        raise ShardError(f"{name} has no hidden width to set; -m is for {widths}")
    if width is not None and width < 1:
        raise ShardError(f"a hidden width of {width}; give 1 or more (-m)")
    if cost_model == "original" and splits_images:
        raise ShardError("the original cost model splits no images; leave out --halo, or choose --cost_model=default")
    rules = OriginalRules(smallest=smallest) if cost_model == "original" else Rules(splits_images=splits_images)
    layers = Layers(name, rules)
    build: Callable[..., None] = import_module(f"baechi_ext.shard.networks.{module}").build
    build(layers, batch, *(() if published is None else (width or published,)))
    return layers.graph()
