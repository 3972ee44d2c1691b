"""`exact`: plans that are proven optimal, where a proof can be had in time."""
