"""The calls of a module in the caller's own training loop or script, placed."""
