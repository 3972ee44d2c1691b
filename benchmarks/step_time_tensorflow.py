"""`benchmarks.step_time --framework=tensorflow`: every method's plan run by TensorFlow, in turn with the user's tf.function and one device.

A device is a server process on a core of its own (or with --workers=thread a logical device of this process); what each spends on its
core in a step, transfers included, stands beside the wall time.
"""

import argparse
import sys
from contextlib import ExitStack
from typing import Any

from baechi_ext.place.common import PlaceOptions, PlanResult
from benchmarks.machine import machine
from benchmarks.step_time_rows import plans_of, rows
from runtime import pipeline
from runtime.compare.contender import SINGLE
from runtime.models.registry import ModelOptions
from runtime.program import one_device_timeline
from runtime.tensorflow.coarse import COARSE, begins_coarse
from runtime.tensorflow.comparing import check_contenders, sessions_of
from runtime.tensorflow.measure import measure, peak_bytes
from runtime.tensorflow.placed_graph import placed_graph
from runtime.tensorflow.servers import Devices
from runtime.tensorflow.session import PlacedSession
from runtime.tensorflow.training import (
    Captured,
    capture_and_profile,
    check_parity,
    find_cluster,
    kind_of_executor,
    one_thread,
    open_devices,
    unplaced_step,
)
from runtime.train_request import TrainRequest

SIZES = {
    "inception_v3": ModelOptions(4, 299),
    "wide_towers": ModelOptions(),
    "gnmt_v2": ModelOptions(32, num_devices=2, vocab_size=2000, max_seq_length=10, rnn_units=1024, num_layers=4),
    "nasnet": ModelOptions(4),
}
BY_HAND = "tf.device"
METHODS = ("contiguous", "expert", "m_topo", "m_etf", "m_sct", "auto")


def run(args: argparse.Namespace, request: TrainRequest) -> dict[str, Any]:
    """Everything measured, as JSON."""
    one_thread()
    with ExitStack() as stack:
        devices, _ = open_devices(request, stack)
        captured = capture_and_profile(request, devices)
        cluster, probe = find_cluster(request, devices)
        single = one_device_timeline(captured.alone)
        methods = dict.fromkeys((SINGLE, *(args.methods or METHODS)))
        contenders = check_contenders(captured, cluster, (devices, devices), {m: _asked(args, m) for m in methods})
        plans = plans_of(contenders)
        parity = {c.method: c.parity.to_json() for c in contenders if c.parity is not None}
        peaks = {c.method: c.peak_bytes for c in contenders}
        if "expert" in plans:
            with parted_by_hand(captured, plans["expert"], devices) as session:
                parity[BY_HAND], peaks[BY_HAND] = check_parity(captured, session).to_json(), peak_bytes(session, devices)
        sessions = sessions_of(captured, contenders, (devices, devices))
        if "expert" in plans:
            sessions[BY_HAND] = parted_by_hand(captured, plans["expert"], devices)
        where = dict.fromkeys(sessions, devices)
        measurement = measure(where, unplaced_step(captured.step), sessions, num_steps=args.num_steps)
    predicted = {"single": list(single.peak_memory_bytes), **{m: list(p.timeline.peak_memory_bytes) for m, p in plans.items()}}
    return {
        "command": "python -m benchmarks.step_time " + " ".join(sys.argv[1:]),
        **machine(),
        "link": None if probe is None else probe.to_json(),
        "load_of_others": measurement.load_of_others,
        "workers": f"TensorFlow {kind_of_executor(request)}",
        "devices": list(captured.function.notes),
        "peaks_measured_by": "none" if devices.shared_memory else "allocator",
        "left_out": {c.method: c.refusal for c in contenders if c.refusal},
        "parity": parity,
        "verdict": {m: _verdict(p) for m, p in plans.items() if m in pipeline.SEARCHES},
        "rows": [
            {
                **row,
                "cpu_seconds": [us / 1e6 for us in row["busy_us"]],
                "peak_memory_bytes": {
                    "predicted": predicted.get(row["variant"], []),
                    "measured": list(peaks.get(row["variant"], ())),
                },
            }
            for row in rows(measurement, plans, single.makespan_us)
        ],
    }


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


def _asked(args: argparse.Namespace, method: str) -> pipeline.PlanRequest:
    """As `baechi train` would plan it."""
    coarse = args.grouper is None and args.placer_type is None and args.workers == "process" and begins_coarse(method)
    grouper, placer_type = COARSE if coarse else (args.grouper or "tf", args.placer_type or "default")
    return pipeline.PlanRequest(method, grouper, placer_type, options=PlaceOptions(seed=0))


def _verdict(result: PlanResult) -> str:
    return "it splits" if result.splits else "splitting does not pay: nothing faster than one device was found"
