"""Which call of the forward graph each op of a captured training step comes from: so the step's ops split as the calls do.

The forward graph is traced once more with its backward pass, each call noted on what comes of it; that gives the ops of the step again,
in the same order. Gradients that are added up belong to nobody's call, and go with the first op they read.
"""

from difflib import Match, SequenceMatcher
from functools import partial

from torch import Tensor, fx, nn
from torch.fx import traceback

from baechi_ext.capture.torch_joint import CaptureOptions, capture_joint
from baechi_ext.hybrid.sharding import Sharding
from baechi_ext.ir.op_graph import OpGraph
from baechi_runtime.sharding.binding import bind, executable
from baechi_runtime.sharding.captured import ForwardGraph, captured_graph, forward_graph
from baechi_runtime.torch.backend import Captured

_KEY, _META = "baechi_call", "custom"
"""Metadata that torch carries from a node that is run to those that are traced from it."""


class _Noted(nn.Module):
    """A forward graph that is run call by call, each noted on the nodes that are traced meanwhile."""

    def __init__(self, forward: ForwardGraph) -> None:
        super().__init__()
        self.calls = forward.program.module()
        for node in list(self.calls.graph.nodes):
            if node.op != "call_function":
                continue
            node.meta[_META] = {_KEY: node.name}
            if node.meta.get("val") is None and not node.users:  # a check, which computes nothing
                self.calls.graph.erase_node(node)

    def forward(self, *inputs: Tensor) -> Tensor:
        with traceback.preserve_node_meta():
            return fx.Interpreter(self.calls).run(*inputs)


def sharding_of(captured: Captured) -> Sharding:
    """The way the ops of a captured step split. Raises CaptureError where forward can't be captured by itself."""
    step, graph = captured.step, captured.graph
    forward = forward_graph(step.module, step.inputs, step.name)
    calls_graph = captured_graph(forward, batch_dim=step.batch_dim)
    nodes, bound = calls_graph.graph, bind(calls_graph)
    number = {node.name: n for n, node in enumerate(nodes.nodes)}
    again, binding = capture_joint(_Noted(forward), step.inputs, CaptureOptions(step.optimizer.name, step.optimizer.slots))
    calls = [None if op.node is None else (op.node.meta.get(_META) or {}).get(_KEY) for op in binding.ops]
    node_of: list[int | None] = [None] * len(graph)
    for block in _matching(graph, again):
        for i in range(block.size):
            node_of[block.a + i] = number.get(calls[block.b + i] or "")
    for v in graph.order:
        if node_of[v] is None:
            node_of[v] = _inherited(graph, node_of, v)
    return Sharding(nodes, tuple(node_of), partial(executable, bound=bound))


def _matching(graph: OpGraph, again: OpGraph) -> list[Match]:
    """Runs of ops that are alike in both."""
    ours, others = ([(op.phase, op.op) for op in g.ops] for g in (graph, again))
    return SequenceMatcher(None, ours, others, autojunk=False).get_matching_blocks()


def _inherited(graph: OpGraph, node_of: list[int | None], v: int) -> int | None:
    """The node of the forward op that an update or gradient belongs to, else of the first op that it reads."""
    forward = graph.index.get(graph.ops[v].forward_op or "")
    if forward is not None and node_of[forward] is not None:
        return node_of[forward]
    if graph.ops[v].phase == "forward":
        return None
    return next((node_of[p] for p in graph.predecessors[v] if node_of[p] is not None), None)
