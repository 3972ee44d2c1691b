"""Which ops share a device, and which are placed as one: `registry.group` returns a Grouping, a coarse graph and `expand()`."""
