"""A sample of a product in which any two values of two factors come together: most faults need no more (Kuhn, Wallace and Gallo 2004)."""

from collections.abc import Hashable, Sequence
from itertools import combinations, product


def pairwise(*factors: Sequence[Hashable]) -> list[tuple]:
    """Rows of the product, always the same: each is the first of those with the most pairs that no row before it has."""
    rows = {row: set(combinations(enumerate(row), 2)) for row in product(*factors)}
    left, chosen = set().union(*rows.values()), []
    while left:
        chosen.append(max(rows, key=lambda row: len(rows[row] & left)))
        left -= rows[chosen[-1]]
    return chosen
