"""`baechi export`: a plan in the formats of other programs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baechi_ext.ir import Plan
from baechi_ext.ir.dot import quoted
from baechi_ext.ir.files import encode_text, write_json, write_text
from baechi_ext.ir.hints import DeviceMap, nearest_map
from baechi_ext.ir.made_by import MadeBy, signed
from baechi_ext.ir.plan import memory_violations
from baechi_ext.ir.split_spec import split_spec, stages_of
from baechi_ext.place.trial import try_orders
from baechi_ext.simulate import Simulator, Timeline, simulate
from baechi_runtime.report.palette import device_colour, text_colour
from baechi_runtime.report.tables import as_size, as_time

if TYPE_CHECKING:
    from baechi_runtime.report.report import Report


@dataclass(frozen=True, slots=True)
class Export:
    """The content of the file, an object or text; what --json reports; and lines for people."""

    content: dict[str, Any] | str
    printed: "Report"
    lines: Sequence[str]

    def save(self, path: str) -> None:
        """Writes the file. Raises FileError."""
        if isinstance(self.content, str):
            write_text(path, self.content)
        else:
            write_json(path, self.content)

    @property
    def text(self) -> str:
        """The file's text, for a terminal or a pipe."""
        if isinstance(self.content, str):
            return encode_text(self.content).decode()
        return json.dumps(self.content, indent=1, allow_nan=False)


def export(plan: Plan, kind: str, made_by: MadeBy) -> Export:
    """The plan in one of FORMATS, signed where that has a place for it. Raises GraphError or PlanError for what the format can't say."""
    return FORMATS[kind][0](plan, made_by)


def _device_map(plan: Plan, _: MadeBy) -> Export:
    """The device map that is nearest to the plan, how much of the plan it keeps, and what that costs. Ops without a named module follow
    their neighbours, as they do when the map is read. Raises GraphError for a graph whose ops don't know their modules."""
    from baechi_runtime.report.printed import ExportedMap  # here as in the other formats: the command line reads them before it has msgspec

    graph, cluster, planned_us = plan.graph, plan.cluster, _simulated(plan).makespan_us
    devices = nearest_map(graph, plan.placement)
    hinted = DeviceMap("the exported map", devices).apply(graph, [d.name for d in cluster.devices])
    placement = [op.expert or 0 for op in hinted.ops]
    kept_time, kept_bytes = (_kept([getattr(op, cost) for op in graph.ops], placement, plan) for cost in ("compute_us", "persistent_bytes"))
    placed = try_orders(Simulator(graph, cluster), placement, (plan.priority, None))
    violations = memory_violations(cluster, placed.timeline.peak_memory_bytes)
    printed = ExportedMap(
        device_map=devices,
        kept_time=kept_time,
        kept_bytes=kept_bytes,
        plan_step_us=planned_us,
        predicted_step_us=placed.makespan_us,
        peak_memory_bytes=list(placed.timeline.peak_memory_bytes),
        violations=violations,
    )
    slower = f", {placed.makespan_us / planned_us - 1:+.1%} beside the plan's {as_time(planned_us)}" if planned_us else ""
    lines = [
        f"device map      {len(devices)} names",
        f"kept            {kept_time:.1%} of the plan's compute time, {kept_bytes:.1%} of its parameters and states",
        f"predicted step  {as_time(placed.makespan_us)}{slower}",
        f"violations      {'; '.join(violations) or 'none'}",
    ]
    return Export(devices, printed, lines)


def _kept(costs: Sequence[float], placement: Sequence[int], plan: Plan) -> float:
    """The part of the ops' costs that a placement has where the plan has it."""
    kept = sum(cost for cost, a, b in zip(costs, placement, plan.placement, strict=True) if a == b)
    return kept / sum(costs) if sum(costs) else 1.0


def _split_spec(plan: Plan, _: MadeBy) -> Export:
    from baechi_runtime.report.printed import ExportedSplit, ExportedStage

    graph, names = plan.graph, [device.name for device in plan.cluster.devices]
    stages = stages_of(graph, plan.placement)
    content = split_spec(stages)
    times = [sum(graph.ops[v].compute_us for v in stage.ops) for stage in stages]
    rows = [
        ExportedStage(device=stage.device, begins=stage.begins, forward_ops=len(stage.ops), forward_us=us)
        for stage, us in zip(stages, times, strict=True)
    ]
    lines = [
        f"stage {i:<9} {names[stage.device]}, {stage.begins or 'from the start'}: {len(stage.ops)} forward ops, {as_time(us)}"
        for i, (stage, us) in enumerate(zip(stages, times, strict=True))
    ]
    return Export(content, ExportedSplit(split_spec=content, stages=rows), lines)


def _node_link(plan: Plan, made_by: MadeBy) -> Export:
    """The graph file's object with the plan's and the simulated step's facts on its nodes."""
    from baechi_runtime.report.printed import ExportedGraph

    timeline, names = _simulated(plan), [device.name for device in plan.cluster.devices]
    content = plan.graph.to_json()
    content["graph"] = signed(content["graph"], made_by)
    for v, node in enumerate(content["nodes"]):
        device = plan.placement[v]
        node |= {"device": device, "device_name": names[device], "start_us": timeline.start_us[v], "end_us": timeline.end_us[v]}
    lines = [f"node-link       {len(content['nodes'])} nodes, {len(content['edges'])} edges; networkx.node_link_graph reads them"]
    return Export(content, ExportedGraph(**content), lines)


def _dot(plan: Plan, made_by: MadeBy) -> Export:
    """Graphviz: a node an op, coloured by its device; tensors that are sent are bold."""
    from baechi_runtime.report.printed import ExportedDot

    graph, timeline = plan.graph, _simulated(plan)
    lines = [f"// {made_by}", f"digraph {quoted(graph.name or 'plan')} {{", '  rankdir=LR; node [shape=box, fontname="sans-serif"];']
    for device, about in enumerate(plan.cluster.devices):
        lines.append(f"  {quoted(f'device {device}')} [label={quoted(about.name)}, shape=plain, {_colours(device)}];")
    for v, op in enumerate(graph.ops):
        device, span = plan.placement[v], f"{as_time(timeline.start_us[v])} to {as_time(timeline.end_us[v])}"
        label = quoted(f"{op.id}\n{op.op}\n{span}" if op.op and op.op != op.id else f"{op.id}\n{span}")
        lines.append(f"  {quoted('op ' + op.id)} [label={label}, {_colours(device)}];")
    for v, op in enumerate(graph.ops):
        for t in graph.inputs[v]:
            tensor = graph.tensors[t]
            ends = f"{quoted('op ' + graph.ops[tensor.producer].id)} -> {quoted('op ' + op.id)}"
            sent = plan.placement[tensor.producer] != plan.placement[v]
            lines.append(f"  {ends}" + (f" [style=bold, label={quoted(as_size(tensor.bytes))}]" if sent else "") + ";")
    text = "\n".join([*lines, "}", ""])
    return Export(text, ExportedDot(dot=text), [f"graph           {len(graph)} ops; dot -Tsvg draws it"])


def _simulated(plan: Plan) -> Timeline:
    return simulate(plan.graph, plan.cluster, plan.placement, plan.priority)


def _colours(device: int) -> str:
    colour = device_colour(device)
    return f'fillcolor="{colour}", fontcolor="{text_colour(colour)}", style=filled'


DEFAULT = "device_map"
FORMATS: dict[str, tuple[Callable[[Plan, MadeBy], Export], str]] = {
    "device_map": (_device_map, "accelerate's: module -> device, the nearest to the plan"),
    "split_spec": (_split_spec, "torch.distributed.pipelining's: the modules before which stages begin, where the plan is a chain of them"),
    "dot": (_dot, "Graphviz: the graph, coloured by device"),
    "node_link": (_node_link, "networkx's node-link JSON, with device and times on the nodes"),
}
