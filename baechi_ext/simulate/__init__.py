"""The event simulator: what a plan is worth, by the rules of docs/simulator.md."""

from baechi_ext.simulate.simulator import Simulator, lower_bound_us, simulate
from baechi_ext.simulate.timeline import Timeline, Transfer

__all__ = ["Simulator", "Timeline", "Transfer", "lower_bound_us", "simulate"]
