"""Orders to eliminate nodes in: which node's configuration is minimised out next. All are exact; they differ in how large tables grow."""

from collections.abc import Callable, Sequence

from baechi_ext.errors import ShardError

Neighbours = Sequence[frozenset[int]]


def generate_seq(neighbours: Neighbours, sizes: Sequence[int]) -> list[int]:
    """Always the node with the fewest neighbours, which then become each other's (Elango, IPDPS 2021, figure 3: GenerateSeq)."""
    return _greedy(neighbours, lambda v, near: len(near[v]))


def min_fill(neighbours: Neighbours, sizes: Sequence[int]) -> list[int]:
    """Always the node that makes the fewest new neighbours; of these, the one with the fewest."""

    def fill(v: int, near: list[set[int]]) -> tuple[int, int]:
        around = near[v]
        missing = sum(len(around - near[w]) - 1 for w in around)
        return missing, len(around)

    return _greedy(neighbours, fill)


def min_table(neighbours: Neighbours, sizes: Sequence[int]) -> list[int]:
    """Always the node whose neighbours have the fewest configurations together: their table is the one to build."""

    def table(v: int, near: list[set[int]]) -> int:
        size = sizes[v]
        for w in near[v]:
            size *= sizes[w]
        return size

    return _greedy(neighbours, table)


def breadth_first(neighbours: Neighbours, sizes: Sequence[int]) -> list[int]:
    """The nodes from the first one outwards, as the original's naive algorithm goes; tables grow with all that is at the same distance."""
    order: list[int] = []
    seen: set[int] = set()
    for root in range(len(neighbours)):
        if root in seen:
            continue
        queue = [root]
        seen.add(root)
        for v in queue:
            new = sorted(neighbours[v] - seen)
            seen.update(new)
            queue.extend(new)
        order.extend(queue)
    return order


def _greedy(neighbours: Neighbours, score: Callable[[int, list[set[int]]], object]) -> list[int]:
    """Always the node of least score, the first of several; scores are looked at again where neighbours changed."""
    near = [set(n) for n in neighbours]
    scores = {v: score(v, near) for v in range(len(near))}
    order = []
    while scores:
        v = min(scores, key=lambda w: (scores[w], w))
        del scores[v]
        order.append(v)
        around = near[v]
        changed = set(around)
        for w in around:
            near[w] = (near[w] | around) - {v, w}
        for w in around:
            changed |= near[w]
        for w in changed:
            if w in scores:
                scores[w] = score(w, near)
    return order


ORDERS: dict[str, Callable[[Neighbours, Sequence[int]], list[int]]] = {
    "generate_seq": generate_seq,
    "min_fill": min_fill,
    "min_table": min_table,
    "breadth_first": breadth_first,
}


def elimination_order(name: str, neighbours: Neighbours, sizes: Sequence[int]) -> list[int]:
    """The order of that name. Raises ShardError for an unknown one."""
    if name not in ORDERS:
        raise ShardError(f"unknown order {name!r}; choose one of {', '.join(ORDERS)}")
    return ORDERS[name](neighbours, sizes)
