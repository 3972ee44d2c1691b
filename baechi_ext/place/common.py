"""What all placers share: their options, their result, and how a placement becomes a plan."""

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import baechi_ext
from baechi_ext.errors import InfeasibleError
from baechi_ext.ir.check import memory_violations, verify_placement
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.ir.plan import Plan
from baechi_ext.simulate import Simulator, Timeline, lower_bound_us


@dataclass(frozen=True, slots=True)
class PlaceOptions:
    """What a caller may choose; a placer reads what concerns it."""

    seed: int = 0
    sct_threshold: float = 0.1
    """m_sct: an LP value up to this much counts as a favourite child (Baechi's default)."""
    time_limit_seconds: float = 60.0
    """For solvers and searches."""


@dataclass(frozen=True)
class PlanResult:
    """A plan, its simulated timeline, and what is known of its quality."""

    plan: Plan
    timeline: Timeline

    @property
    def status(self) -> str:
        return self.plan.status

    @property
    def predicted_step_us(self) -> float:
        return self.plan.predicted_step_us

    @property
    def lower_bound_us(self) -> float:
        return self.plan.lower_bound_us

    @property
    def placement_seconds(self) -> float:
        return self.plan.placement_seconds
