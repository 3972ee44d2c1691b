"""Groupers: which ops are placed as one. Each returns a Grouping: the coarse graph and `expand()`."""
