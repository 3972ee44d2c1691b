"""A shard graph in Graphviz's language."""

from baechi_ext.shard.graph import ShardGraph


def dot(graph: ShardGraph) -> str:
    """The graph's nodes with their iteration spaces, and the shapes of the tensors between them."""
    lines = [f'digraph "{graph.name}" {{', "  node [shape=box];"]
    for i, node in enumerate(graph.nodes):
        loops = ", ".join(f"{axis.name} {axis.size}" for axis in node.axes)
        lines.append(f'  {i} [label="{node.name}\\n{loops}"];')
    for edge in graph.edges:
        shape = " x ".join(map(str, graph.nodes[edge.source].outputs[edge.output].shape))
        lines.append(f'  {edge.source} -> {edge.target} [label="{shape}"];')
    return "\n".join([*lines, "}", ""])
