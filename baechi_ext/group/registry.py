"""All groupers and placer types by name; the order is the order of menus. Modules are loaded when one is asked for."""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from baechi_ext.errors import OptionError
from baechi_ext.group.forward import fold_unimportant, forward_nodes
from baechi_ext.group.grouping import Grouping, GroupOptions, compose, identity
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph

GROUPERS: dict[str, tuple[str, str]] = {
    "tf": ("baechi_ext.group.colocation:tf", "the graph's own colocation groups"),
    "coplace": ("baechi_ext.group.colocation:coplace", "an op with one successor joins its group (Baechi), within balance"),
    "grain": ("baechi_ext.group.grain:grain", "ops are joined where separating them would cost more than it could gain, within balance"),
}
"""Name -> (function, help). `grouper(graph, max_share, link)` returns the graph relabelled; no merge passes that share of its costs."""

PLACER_TYPES: dict[str, tuple[str, str]] = {
    "default": ("baechi_ext.group.grouping:identity", "every op by itself, groups as constraints"),
    "colocation": ("baechi_ext.group.group_nodes:colocation", "one node per group, as far as no cycle closes"),
    "fusion": ("baechi_ext.group.fusion:fusion", "ops of a group that run in a row as one (Baechi)"),
}
"""Name -> (function, help). `placer_type(graph, options)` returns the Grouping of a labelled graph."""


def group(
    graph: OpGraph,
    *,
    grouper: str = "tf",
    placer_type: str = "default",
    only_forward: bool = False,
    cluster: Cluster = Cluster.uniform(8),  # noqa: B008 - frozen
    options: GroupOptions = GroupOptions(),  # noqa: B008 - frozen
) -> Grouping:
    """The Grouping of `graph`: place its coarse graph, whose colocation strings bind, and `expand` the placement.

    `only_forward` first makes one op of each forward op and all that follows it, `only_important_ops` of the options folds ops
    that hardly count into others; `grouper` then says which coarse ops share a device, and `placer_type` which of those become
    one. A group that a grouper merges stays below a quarter of the fair share of one of the cluster's devices; `grain` asks besides
    what its links cost on average.

    Raises OptionError for an unknown name, GraphError where `only_forward` meets a `forward_op` that is not a forward op.
    """
    label = _load(GROUPERS, grouper, "grouper")
    contract = _load(PLACER_TYPES, placer_type, "placer type")
    base = forward_nodes(graph) if only_forward else identity(graph)
    if options.only_important_ops:
        base = compose(base, fold_unimportant(base.coarse))
    return compose(base, contract(label(base.coarse, 1 / (4 * len(cluster)), cluster.mean_link()), options))


def _load(table: Mapping[str, tuple[str, str]], name: str, what: str) -> Any:
    if name not in table:
        raise OptionError(f"unknown {what} {name!r}; choose one of {', '.join(table)}")
    return resolve_name(table[name][0])
