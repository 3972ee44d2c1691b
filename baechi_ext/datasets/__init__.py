"""Families of graphs to train learned placers on, and to compare all of them: `load` reads what `baechi datasets make` makes."""

from baechi_ext.datasets.families import FAMILIES, INSTALLED, SPLITS, load, read_index

__all__ = ["FAMILIES", "INSTALLED", "SPLITS", "load", "read_index"]
