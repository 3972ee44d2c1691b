"""`benchmarks.step_time --framework=tensorflow`: every method's plan run by TensorFlow, in turn with the user's tf.function and one device.

A device is a server process on a core of its own (or with --workers=thread a logical device of this process); what each spends on its
core in a step, transfers included, stands beside the wall time.
"""

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

from baechi_ext.place.common import PlaceOptions, PlanResult
from benchmarks.machine import machine
from benchmarks.step_time_rows import rows
from runtime import pipeline
from runtime.models.registry import ModelOptions
from runtime.program import one_device_timeline
from runtime.tensorflow.coarse import COARSE, begins_coarse
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
    load,
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
        plans: dict[str, PlanResult] = {}
        loaders = {"single": partial(load, captured, single, devices)}
        methods = [m for m in args.methods or METHODS if m != "expert" or any(op.expert is not None for op in captured.graph.ops)]
        for method in methods:
            plans[method] = pipeline.plan(captured.graph, cluster, _asked(args, method))
            loaders[method] = partial(load, captured, plans[method].timeline, devices)
        if "expert" in plans:
            loaders[BY_HAND] = partial(parted_by_hand, captured, plans["expert"], devices)
        parity, peaks = {}, {}
        for name, loader in loaders.items():
            with loader() as session:  # one after the other: what is loaded besides holds constants, which a peak would count
                parity[name] = check_parity(captured, session).to_json()
                peaks[name] = peak_bytes(session, devices)
        sessions = {name: loader() for name, loader in loaders.items()}
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
        "left_out": {},
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
