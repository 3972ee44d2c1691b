"""Capture of a PyTorch training step over parts of its batch: one op graph with a copy of forward and backward for each part.

The copies share what does not depend on the batch. Parameters and buffers are ops whose tensors the copies read, so that they can be sent,
once a step, to every device that needs them; the parts' gradients are added up, and there is one update. Each copy on a device of its own
is data parallelism, stages of layers are a pipeline (GPipe: Huang et al., NeurIPS 2019), and anything between is a placement like others.

The loss stays the batch's, as torch_split splits the step by the rules of its ops. What sees the whole batch at once is refused; so is
BatchNorm, unless it may normalise each part by itself.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from baechi_ext.capture.batch_rows import Split
from baechi_ext.capture.parts import Parts
from baechi_ext.capture.torch_joint import (
    OP_ID,
    PART,
    Binding,
    BoundOp,
    CaptureOptions,
    Owner,
    _Builder,
    _bytes,
    _is_view,
    _Nodes,
)
from baechi_ext.capture.torch_private import arguments_by_name
from baechi_ext.capture.torch_split import split_along
from baechi_ext.errors import CaptureError
from baechi_ext.ir.op_graph import Op, OpGraph

if TYPE_CHECKING:
    import torch
    from torch import fx

PARAMETER = "parameter"
"""The op whose tensor is a parameter or buffer."""


def capture_parts(
    module: "torch.nn.Module", captured: Binding, options: CaptureOptions, parts: Parts, name: str = ""
) -> tuple[OpGraph, Binding]:
    """The costless op graph of one training step of `module` over parts of its batch, and the binding to run it. `captured`: the step as
    `capture_joint` gave it, over the whole batch or over other parts.

    Raises CaptureError, too, where the step mixes examples, or may, as by random numbers for all of them but dropout's.
    """
    joint: Any = captured.joint
    nodes = _Nodes.of(joint)
    parts = replace(parts, batch_norm_per_part=require_parts_may_differ(nodes.calls, parts))
    split = {node: Split(dim) for node, index in nodes.plain.items() if (dim := parts.dims[index]) is not None}
    try:
        parted = split_along(joint, nodes, split, parts.sizes, batch_norm_per_part=parts.batch_norm_per_part)
    except CaptureError as e:
        raise CaptureError(f"{e}; give --microbatches=1") from e
    graph, binding = _PartsBuilder(Owner.of(module), _Nodes.of(parted), options, parts).build(name)
    return graph, replace(binding, joint=joint)


def require_parts_may_differ(nodes: "Iterable[fx.Node]", parts: Parts) -> bool:
    """True if a layer normalises over the batch that is split. Raises CaptureError where the user has not allowed parts."""
    found = normalising(nodes)
    if found and not parts.batch_norm_per_part:
        raise CaptureError(
            f"{len(found)} BatchNorm layers normalise over the whole batch, and parts of it would give other numbers; "
            "--batch_norm=per_part allows that (DistributedDataParallel does it without asking), --microbatches=1 keeps the batch whole"
        )
    return bool(found)


def normalising(nodes: "Iterable[fx.Node]") -> "list[fx.Node]":
    """Those that normalise over a batch."""
    return [n for n in nodes if "batch_norm" in n.name and "backward" not in n.name and arguments_by_name(n).get("training")]


class _PartsBuilder(_Builder):
    """Turns the merged nodes into ops, edges and colocation groups, in which parameters and buffers are ops with tensors."""

    def __init__(self, owner: Owner, nodes: _Nodes, options: CaptureOptions, parts: Parts) -> None:
        super().__init__(owner, nodes, options)
        self.parts = parts
        self.sources: dict[str, int] = {}
        """Parameter or buffer -> its op."""
        self.read_by: dict[int, list[int]] = {}
        """Op -> the ops that read it."""

    def build(self, name: str) -> tuple[OpGraph, Binding]:
        for node, state in self.nodes.state.items():
            if node.users:
                self._add_state(node, self.state_names[state])
        graph, binding = super().build(name)
        # What is a tensor now stands in a slot like any other.
        others = {node: state for node, state in binding.state_nodes.items() if node not in self.home}
        return graph, replace(binding, state_nodes=others, parts=self.parts)

    def _add_state(self, node: "fx.Node", state: str) -> None:
        """The op that a parameter or buffer is read from, by all its names."""
        if state not in self.sources:
            size = _bytes(self.state[state])
            op = Op(f"{PARAMETER}.{state}", PARAMETER, persistent_bytes=size, output_bytes=size, module=self._owner(state), resident=True)
            v = self.sources[state] = self._add(op, BoundOp(state=state))
            self.groups.join(v, state)
            self.state_readers[state] = [v]
        self._own(node, self.sources[state], "0")

    def _read(self, node: "fx.Node", v: int) -> None:
        super()._read(node, v)
        base = self._base(node)
        if isinstance(base, tuple):
            self.read_by.setdefault(base[0], []).append(v)

    def _keep_together(self, update: int, maker: int) -> None:
        """Parts make gradients wherever they run."""

    def _order_readers(self, parameter: str, update: int) -> None:
        """The update overwrites the parameter in place, so whoever reads the old value goes first: before its part's gradient is made,
        where only sums wait for that, as both tend to be on one device then, and the update waits for all gradients anyway."""
        makers = self._makers(parameter)
        for reader in dict.fromkeys(self.read_by.get(self.sources[parameter], [])):
            if not self.ancestors[update] >> reader & 1:
                self._order(reader, makers.get(self.ops[reader].part, update))

    def _makers(self, parameter: str) -> dict[int | None, int]:
        """Part -> the op that makes the parameter's gradient, where only sums and updates read what it makes."""
        made: dict[int | None, int] = {}
        left = [node for name, node in self.nodes.gradients.items() if self.state_names[name] == parameter]
        while left:
            node = left.pop()
            if (part := node.meta.get(PART)) is not None and isinstance(base := self._base(node), tuple):
                made[part] = base[0]
            elif _is_view(node) or str(node.meta.get(OP_ID)).startswith("sum."):
                left += node.all_input_nodes
        return {part: v for part, v in made.items() if all(self.ops[w].part is None for w in self.read_by.get(v, ()))}
