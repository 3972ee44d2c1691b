"""Why a plan takes as long as it does, what would change that, and what two plans differ in. Pure: everything is simulated."""

from baechi_ext.explain.diff import PlanDiff, diff_plans
from baechi_ext.explain.explain import PlanExplanation, explain_plan
from baechi_ext.explain.op_choices import Mover, OpChoices, op_choices

__all__ = ["Mover", "OpChoices", "PlanDiff", "PlanExplanation", "diff_plans", "explain_plan", "op_choices"]
