"""Automatic device placement for training deep networks: the deciding half. Importing it loads no deep-learning framework."""

__version__ = "0.1.0"
