"""A process's part of a step on groups: it runs the pieces of its group, each call on its part, and autograd runs each piece backward."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from runtime.hybrid.call_log import CallLog, NotingWires
from runtime.hybrid.calls import CallPlan
from runtime.hybrid.program import Piece, Programs
from runtime.hybrid.wires import Wires
from runtime.sharding.align import lay_out
from runtime.sharding.captured import captured_graph
from runtime.sharding.execute import ShardedStep
from runtime.sharding.forward import ForwardGraph, forward_graph
from runtime.sharding.layout import mesh_shape
from runtime.sharding.mesh import make_mesh
from runtime.sharding.moves import part_shape
from runtime.sharding.op_names import in_place, plain
from runtime.sharding.program import PieceOfProgram
from runtime.step import TrainingStep


class GroupStep:
    """The part of process `rank` in the plan's step; every process of the plan has to make it, and to run it.

    `sharded` holds the parameters and buffers that live in its group; `programs` are those of all groups.
    """

    def __init__(self, step: TrainingStep, plan: CallPlan, rank: int, timeout_seconds: float) -> None:
        self.step = step
        forward = forward_graph(step.module, step.inputs, step.name)
        without_changes_in_place(forward)
        captured = captured_graph(forward)
        shape = mesh_shape(len(plan.groups[0]))
        layouts = lay_out(forward, captured, plan.strategy(captured.graph.nodes), shape)
        self.programs = Programs(forward, plan)
        self.group, place = next((g, members.index(rank)) for g, members in enumerate(plan.groups) if rank in members)
        pieces = self.programs.forward[self.group]
        self.sharded = ShardedStep(forward, step.module, layouts, make_mesh("cpu", shape, plan.groups), [piece.calls for piece in pieces])
        self._written = self._pieces(None)
        self._whole_loss = self.sharded.program.reader(forward.loss)
        self._ends = self.programs, self.group, place, self._empty_part, timeout_seconds
        self._wires = Wires(*self._ends)

    @property
    def sent_bytes(self) -> int:
        """What this process sent to other groups in the last step."""
        return self._wires.sent_bytes

    @contextlib.contextmanager
    def noted(self, log: CallLog) -> Iterator[None]:
        """Has steps inside run by programs, and over wires, that note when they do what; those of other steps stay as they are."""
        kept = self._written, self._wires
        noting = NotingWires(*self._ends)
        noting.log = log
        self._written, self._wires = self._pieces(log), noting
        try:
            yield
        finally:
            self._written, self._wires = kept

    def _pieces(self, log: CallLog | None) -> list[PieceOfProgram]:
        noting = None if log is None else log.noting
        return [self.sharded.program.piece(piece.calls, piece.writes, noting) for piece in self.programs.forward[self.group]]

    def run(self) -> Tensor | None:
        """The loss of one step, where this group computes it, and gradients on the parts of parameters that live here."""
        wires, programs = self._wires, self.programs
        roots: dict[fx.Node, Tensor] = {}
        """What pieces wrote, as autograd knows it."""
        wires.begin()
        held = self.sharded.begin(self.step.inputs)
        """What pieces read; cut off from what it was computed of, so that its gradient is added up there."""
        for piece, written in zip(programs.forward[self.group], self._written, strict=True):
            for node in piece.takes:
                held[node] = self._cut_off(node, wires.take((node, self.group, False)))
            for node, value in zip(piece.writes, written.run(*(held[node] for node in written.reads)), strict=True):
                roots[node], held[node] = value, self._cut_off(node, value)
            for node, target in piece.gives:
                wires.give((node, target, False), held[node])
        wires.turn()
        loss = None
        if self.group == programs.loss_group:
            loss = self._whole_loss(held[programs.graph.loss])
            loss.backward()
        for piece in programs.backward[self.group]:
            self._run_backward(piece, held, roots)
        self.sharded.finish()
        wires.finish()
        return None if loss is None else loss.detach()

    def _run_backward(self, piece: Piece, held: dict[fx.Node, Tensor], roots: dict[fx.Node, Tensor]) -> None:
        tensors, gradients = [], []
        for node in piece.writes:
            if node not in self.programs.learned:
                continue
            back = [(node, target, True) for n, target in piece.gives if n is node and (node, target) in self.programs.returned]
            summands = [part for part in (held[node].grad, *map(self._wires.take, back)) if part is not None]
            root = roots.pop(node)
            if summands and root.requires_grad:
                tensors.append(root)
                gradients.append(sum(summands[1:], start=summands[0]))
        if tensors:
            torch.autograd.backward(tensors, gradients)
        for node in piece.returns:
            value = held[node]
            self._wires.give((node, self.group, True), torch.zeros_like(value) if value.grad is None else value.grad)

    def _cut_off(self, node: fx.Node, value: Tensor) -> Tensor:
        return value.detach().requires_grad_(node in self.programs.learned) if isinstance(value, Tensor) else value

    def _empty_part(self, node: fx.Node) -> Tensor:
        value, program = node.meta["val"], self.sharded.program
        return torch.empty(part_shape(tuple(value.shape), program.places(node), program.mesh), dtype=value.dtype)


def without_changes_in_place(forward: ForwardGraph) -> None:
    """Has calls that write over their first argument make a new value instead, which is read after them. Buffers are written over."""
    for call in forward.nodes:
        if not in_place(call) or call.args[0].name in forward.buffers:
            continue
        changed = call.args[0]
        later = False
        for user in forward.program.graph.nodes:
            if later and changed in user.all_input_nodes:
                user.replace_input_with(changed, call)
            later = later or user is call
        call.target = plain(call)

