"""Placers: one algorithm, one file, one signature `(graph, cluster, options) -> PlanResult`; registry.py names them all."""
