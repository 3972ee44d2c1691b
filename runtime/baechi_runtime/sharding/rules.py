"""Which loops of an op can be shared out so that each process runs the op itself on its parts: shard in, shard or partial sum out.

An op that is not named here, and an axis that a rule excludes, is not split: what the op reads is gathered, and every process computes all.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor as Values
from torch import fx
from torch.fx.node import map_arg

from baechi_ext.capture.torch_private import arguments_by_name
from baechi_ext.shard.graph import Tensor
from baechi_runtime.sharding import local_ops
from baechi_runtime.sharding.local_ops import Runner
from baechi_runtime.sharding.op_names import argument_at, is_pointwise, op_name

Dimension = tuple[int, int]
"""Which of the tensors that a call reads, and one of its dimensions."""


@dataclass(frozen=True)
class Rule:
    """`run`: what runs on the parts, if not the op itself. `whole`: dimensions of arguments that a part of the result needs all of. `sums`:
    over an axis that the result lacks, the parts' results add up. `spreads`: an axis may be the result's alone. `aligned`: arguments are
    broadcast to the result."""

    run: Runner | None = None
    whole: Callable[[fx.Node], Iterable[Dimension]] = lambda call: ()
    sums: bool = False
    spreads: bool = False
    aligned: bool = False


def arguments(call: fx.Node) -> list[fx.Node]:
    """The tensors that a call reads, in the order of its arguments; one that is read twice is listed twice."""
    found: list[fx.Node] = []

    def visit(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    map_arg((call.args, call.kwargs), visit)
    return found


def rule_of(call: fx.Node) -> Rule | None:
    """The rule by which an op is run in parts; None where that is not known."""
    seeded = torch.Tag.nondeterministic_seeded in getattr(call.target, "tags", ())
    return RULES.get(op_name(call)) or (_POINTWISE if is_pointwise(call) and not seeded else None)


def run_by_rule(call: fx.Node) -> Runner | None:
    """The function that runs on the parts of a call's tensors; None where that is the op itself."""
    rule = rule_of(call)
    return None if rule is None else rule.run


def is_plain(call: fx.Node) -> bool:
    """True if everything that the call reads is a tensor of known size."""
    return all(isinstance(n.meta.get("val"), Values) for n in arguments(call))


def splittable(call: fx.Node, read: Sequence[Tensor], written: Sequence[Tensor]) -> set[int]:
    """The axes that a call can be split along; `read` are its tensors in the order of `arguments`, `written` its results."""
    rule = rule_of(call)
    if rule is None or not written or not is_plain(call):
        return set()
    inside = {a for tensor in read for axes in tensor.axes for a in axes}
    everywhere = set.intersection(*({a for axes in tensor.axes for a in axes} for tensor in written))
    free = (everywhere if rule.spreads else everywhere & inside) | (inside if rule.sums else set())
    for i, dim in rule.whole(call):
        free -= set(read[i].axes[dim])
    return free


# Dimensions that have to be whole


def _all(call: fx.Node) -> list[Dimension]:
    return [(i, d) for i, value in enumerate(arguments(call)) for d in range(_rank(value))]


def _along_dim(call: fx.Node) -> list[Dimension]:
    dim = arguments_by_name(call).get("dim")
    return [(0, dim)] if isinstance(dim, int) else _all(call)


def _image(call: fx.Node) -> list[Dimension]:
    return [(0, -1), (0, -2)]


def _convolution(call: fx.Node) -> list[Dimension]:
    given = arguments_by_name(call)
    if given.get("transposed"):
        return _all(call)
    grouped = given.get("groups") != 1
    return [(i, d) for i, first in ((0, 1), (1, 0)) for d in range(first if grouped else 2, _rank(arguments(call)[i]))]


def _normalized(call: fx.Node) -> list[Dimension]:
    return [(0, -1 - i) for i in range(len(argument_at(call, 1)))]


def _attention(call: fx.Node) -> list[Dimension]:
    given = arguments_by_name(call)
    if given["dropout_p"] or given["enable_gqa"]:
        return _all(call)
    found = [(0, -1), (1, -1), (1, -2), (2, -1), (2, -2)]
    rows = given["is_causal"] or given["attn_mask"] is not None
    return [*found, (0, -2)] if rows else found


def _entropy(call: fx.Node) -> list[Dimension]:
    given, ranks = arguments_by_name(call), [_rank(value) for value in arguments(call)]
    plain = ranks == [2, 1] and not given["label_smoothing"]
    return [] if plain and given["reduction"] in (local_ops.MEAN, local_ops.SUM) else _all(call)


def _recurrent(call: fx.Node) -> list[Dimension]:
    inputs, state = argument_at(call, 0), argument_at(call, 1)
    whole = [(i, d) for i in range(len(inputs)) for d in (0, 2)] + [(len(inputs) + i, 1) for i in range(len(state))]
    return [*whole, *((len(inputs) + len(state), d) for d in (0, 1))]


def _table(call: fx.Node) -> list[Dimension]:
    given = arguments_by_name(call)
    return _all(call) if given["scale_grad_by_freq"] or given["sparse"] else []


def _rank(value: fx.Node) -> int:
    return value.meta["val"].dim()


_POINTWISE = Rule(aligned=True)
_RULES = (
    (_POINTWISE, "where masked_fill to type_as clone contiguous detach lift_fresh_copy alias"),
    (Rule(), "transpose permute t cat"),
    (Rule(local_ops.reshape), "view reshape _unsafe_view flatten unflatten squeeze unsqueeze"),
    (Rule(local_ops.expand, spreads=True, aligned=True), "expand"),
    (Rule(whole=_along_dim), "softmax log_softmax split split_copy split_with_sizes chunk slice select amax amin cumsum unbind narrow"),
    (Rule(local_ops.product, sums=True), "linear addmm matmul mm bmm"),
    (Rule(local_ops.product, whole=_convolution, sums=True), "conv1d conv2d conv3d convolution"),
    (Rule(whole=_image), "max_pool2d avg_pool2d adaptive_avg_pool2d"),
    (Rule(whole=_normalized), "layer_norm"),
    (Rule(local_ops.batch_norm, sums=True), "batch_norm"),
    (Rule(local_ops.embedding, whole=_table, sums=True), "embedding"),
    (Rule(whole=_attention), "scaled_dot_product_attention"),
    (Rule(local_ops.dropout), "dropout"),
    (Rule(sums=True), "sum"),
    (Rule(local_ops.mean, sums=True), "mean"),
    (Rule(local_ops.cross_entropy, whole=_entropy, sums=True), "cross_entropy_loss"),
    (Rule(local_ops.squared_error, sums=True, aligned=True), "mse_loss"),
)
RULES = {f"aten.{name}": rule for rule, names in _RULES for name in names.split()}
RULES |= dict.fromkeys(("baechi.lstm", "baechi.gru"), Rule(whole=_recurrent))
"""By op name."""
