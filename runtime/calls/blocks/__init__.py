"""A module whose call can't be captured as one graph: its submodules in blocks, placed."""
