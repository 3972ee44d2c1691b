"""A placer of your own, judged by the same simulator as all others. It needs nothing of this project: it reads a graph file, which is
networkx's node-link JSON, and writes a plan file. This one takes the ops in topological order and puts each colocation group where its
first op would end earliest, transfers included, and devices busy as they are by then: a list scheduler in forty lines.

    python examples/custom_placer.py run/graph.json plan.json --num_devices=2
    baechi simulate run/graph.json plan.json
    baechi place run/graph.json --num_devices=2 --placement_method=m_etf

The second command says what the plan is worth, and which rules it breaks; the third what a method of the project makes of the same graph.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import networkx as nx

US_PER_BYTE, LATENCY_US = 0.0001754, 134.0
"""Cost of sending on every link: the defaults of `baechi place`."""


def read_graph(path: Path) -> nx.MultiDiGraph:
    data = path.read_bytes()
    return nx.node_link_graph(json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data))


def place(graph: nx.MultiDiGraph, num_devices: int) -> dict[Any, int]:
    """A device for every op."""
    free_us = [0.0] * num_devices
    end_us: dict[Any, float] = {}
    device: dict[Any, int] = {}
    device_of_group: dict[str, int] = {}
    for op in nx.topological_sort(graph):
        node = graph.nodes[op]
        begin_us = []
        for d in range(num_devices):
            arrivals = (
                end_us[source] + (0 if device[source] == d else LATENCY_US + US_PER_BYTE * edge["bytes"])
                for source, _, edge in graph.in_edges(op, data=True)
            )
            begin_us.append(max(free_us[d], *arrivals, 0.0))
        group = node.get("colocation")
        earliest = min(range(num_devices), key=lambda d: (begin_us[d], d))
        chosen = earliest if group is None else device_of_group.setdefault(group, earliest)
        device[op], end_us[op] = chosen, begin_us[chosen] + node["compute_us"]
        free_us[chosen] = end_us[op]
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", type=Path)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--num_devices", type=int, default=2)
    args = parser.parse_args()
    graph = read_graph(args.graph)
    device = place(graph, args.num_devices)
    cluster = {
        "devices": [{"name": f"device:{d}"} for d in range(args.num_devices)],
        "links": {"default": {"us_per_byte": US_PER_BYTE, "latency_us": LATENCY_US}},
    }
    plan = {"schema_version": 1, "method": "mine", "cluster": cluster, "placement": {str(op): d for op, d in device.items()}}
    args.plan.write_text(json.dumps(plan), encoding="utf-8")
    print(f"{len(device)} ops on {len(set(device.values()))} of {args.num_devices} devices: {args.plan}")


if __name__ == "__main__":
    main()
