"""What was decided for a captured step."""

from dataclasses import dataclass

from baechi_ext.cost import Profile
from baechi_ext.ir import OpGraph
from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline
from runtime.links import LinkProbe


@dataclass(frozen=True)
class Placement:
    """A captured step, profiled and placed."""

    graph: OpGraph
    """With costs."""
    profile: Profile
    result: PlanResult
    single: Timeline
    """The prediction for one device."""
    notes: tuple[str, ...] = ()
    probe: LinkProbe | None = None

    @property
    def where(self) -> dict[str, int]:
        """Op -> device."""
        return dict(zip(self.graph.index, self.result.plan.placement, strict=True))

    @property
    def order(self) -> list[str]:
        """All ops as they start."""
        return [str(self.graph.ops[v].id) for v in self.result.timeline.started]
