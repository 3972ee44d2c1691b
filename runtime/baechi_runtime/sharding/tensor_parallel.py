"""A strategy as a plan for torch's `parallelize_module`: which linear layers and embeddings are split by columns, and which by rows.

Only what that can express: between the modules of the plan tensors are whole, except where nothing but pointwise functions stands between
a layer split by columns and one split by rows. How the batch is split is not part of the plan.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from torch import fx
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from baechi_ext.errors import OptionError
from baechi_ext.shard.graph import Strategy
from baechi_runtime.sharding.binding import bind
from baechi_runtime.sharding.captured import CapturedGraph
from baechi_runtime.sharding.op_names import argument_at, is_pointwise, op_name

STYLES = {
    "colwise": lambda: ColwiseParallel(),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": lambda: RowwiseParallel(),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""By the names that transformers has for them in a `tp_plan`. `_rep`: what is written (columns) or read (rows) is whole."""


@dataclass(frozen=True)
class TensorParallelPlan:
    """Styles by module for a mesh of one dimension with this many `parts`; `left_out`: modules that are split in another way, and why."""

    parts: int
    styles: dict[str, str]
    left_out: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {"parts": self.parts, "tp_plan": self.styles, "left_out": self.left_out}


def parallelize_plan(styles: Mapping[str, str]) -> dict[str, ParallelStyle]:
    """The plan that `torch.distributed.tensor.parallel.parallelize_module` takes. Raises OptionError for an unknown style."""
    unknown = sorted(set(styles.values()) - set(STYLES))
    if unknown:
        raise OptionError(f"unknown style {unknown[0]!r} of a tp_plan; choose one of {', '.join(STYLES)}")
    return {name: STYLES[style]() for name, style in styles.items()}


def tensor_parallel_plan(captured: CapturedGraph, strategy: Strategy) -> TensorParallelPlan:
    """The plan of a strategy. Modules have the names that they have in the captured module."""
    forward = captured.forward
    uses = Counter(name for call in forward.nodes for name in {forward.parameters.get(n.name) for n in call.all_input_nodes} if name)
    bound = bind(captured)
    split: dict[fx.Node, tuple[str, str, int]] = {}
    left_out: dict[str, str] = {}
    for node, configuration in zip(captured.graph.nodes, strategy, strict=True):
        call = bound[node.name].call
        position = {"aten.linear": 1, "aten.embedding": 0}.get(op_name(call))
        if position is None or argument_at(call, position).name not in forward.parameters:
            continue
        name = forward.parameters[argument_at(call, position).name].removesuffix(".weight")
        rows, columns = (prod(configuration[a] for a in axes) for axes in bound[node.name].read[position].axes)
        if op_name(call) == "aten.linear":
            rows, columns = columns, rows  # the weight of a linear layer is transposed
        if rows == columns == 1:
            continue
        if uses[f"{name}.weight"] > 1:
            left_out[name] = "its weight is read by several calls"
        elif rows > 1 and columns > 1:
            left_out[name] = f"it is split {rows} by rows and {columns} by columns"
        else:
            split[call] = (name, "rowwise" if rows > 1 else "colwise", rows * columns)
    parts = Counter(count for _, _, count in split.values()).most_common(1)[0][0] if split else 1
    left_out |= {name: f"it is split {count} ways" for name, _, count in split.values() if count != parts}
    return TensorParallelPlan(parts, _joined({call: s[:2] for call, s in split.items() if s[2] == parts}), left_out)


def _joined(split: Mapping[fx.Node, tuple[str, str]]) -> dict[str, str]:
    """Styles by module; what passes from columns to rows stays in parts."""
    styles = {name: f"{style}_rep" for name, style in split.values()}
    for call, (name, style) in split.items():
        if style != "colwise":
            continue
        readers = _readers(call)
        if all(reader in split and split[reader][1] == "rowwise" and op_name(reader) == "aten.linear" for reader in readers):
            styles[name] = "colwise"
            styles |= {split[reader][0]: "rowwise" for reader in readers}
    return styles


def _readers(call: fx.Node) -> set[fx.Node]:
    """The calls that read what a call writes, directly or through pointwise functions and dropout."""
    found: set[fx.Node] = set()
    for user in call.users:
        alone = len(user.all_input_nodes) == 1 and is_pointwise(user)
        found |= _readers(user) if alone or op_name(user) == "aten.dropout" else {user}
    return found
