"""Placement and sharding together: ops are placed on groups of devices, and each group's share is split over its devices."""

METHOD = "hybrid"
HELP = "ops placed on groups of devices, and each group's share sharded over them as `baechi pase` does, chosen together (train)"
