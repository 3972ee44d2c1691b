"""The baseline of `benchmarks.step_time --framework=tensorflow`: devices written into the model by hand."""

from msgspec import to_builtins

from baechi_ext.place.common import PlanResult
from baechi_runtime.report.report import ParityCheck
from baechi_runtime.tensorflow.backend import TensorFlowBackend
from baechi_runtime.tensorflow.lowering.placed_graph import placed_graph
from baechi_runtime.tensorflow.parity import check_parity
from baechi_runtime.tensorflow.servers.devices import Devices
from baechi_runtime.tensorflow.servers.session import PlacedSession
from baechi_runtime.tensorflow.servers.traces import peak_bytes
from baechi_runtime.tensorflow.step import Captured

BY_HAND = "tf.device"


def add_by_hand(backend: TensorFlowBackend, captured: Captured, plans: dict[str, PlanResult], found: tuple[dict, dict, dict]) -> None:
    """Adds to variants, peak bytes and parity what a user's own tf.device around each layer comes to, where an expert placed them."""
    if "expert" not in plans:
        return
    variants, peaks, parity = found
    with parted_by_hand(captured, plans["expert"], backend.devices) as session:
        parity[BY_HAND], peaks[BY_HAND] = to_builtins(ParityCheck.of(check_parity(captured, session))), peak_bytes(session)
    variants[BY_HAND] = parted_by_hand(captured, plans["expert"], backend.devices)


def parted_by_hand(captured: Captured, expert: PlanResult, devices: Devices) -> PlacedSession:
    """The step with what a user would write into the model: tf.device around each layer, as the expert has it. Variables are made there as
    well; TensorFlow's own placer decides about all the rest, gradients among it, and nothing gives an order."""
    where = dict(zip(expert.timeline.graph.index, expert.plan.placement, strict=True))
    placed = placed_graph(captured.function, where, devices.names, order=())
    forward = {op.id for op in captured.graph.ops if op.phase == "forward"}
    hint = captured.step.expert or (lambda _: None)
    for node in placed.graph_def.node:
        op = placed.op_of.get(node.name)
        if op is None or node.op == "VarHandleOp":
            continue
        layer = hint(node.name) if op in forward else None
        node.device = "" if layer is None else devices.names[layer % len(devices.names)]
    session = PlacedSession(placed, devices)
    session.initialise(captured.first)
    session.feed(captured.step.inputs)
    return session
