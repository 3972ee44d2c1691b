"""Plans and the profiles they were made with, kept from run to run: the same graph on the same machine is neither measured nor searched
again. An entry is one file, KEY.json.gz, with both in the formats of their own files.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import ValidationError, convert

from baechi_ext.cost import Profile
from baechi_ext.errors import BaechiError
from baechi_ext.ir.made_by import MadeBy, signed
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.ir.plan import Plan
from baechi_runtime.host.cache_folder import find_entry, keep_entry

_FILE = "plans/{}.json.gz"


@dataclass(frozen=True)
class KeptPlan:
    """A plan and its costs, and what was said of them."""

    profile: Profile
    plan: Plan
    notes: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()


def find_plan(cache: Path, key: str, graph: OpGraph) -> KeptPlan | None:
    """The plan of this key, of `graph`, in a cache's folder; None where there is none, it is old, or not as it was written."""
    found = find_entry(cache, _FILE, key) or {}
    try:
        profile, plan = (convert(found.get(name), dict[str, Any]) for name in ("profile", "plan"))
        notes, untried = (convert(found.get(name), tuple[str, ...]) for name in ("notes", "untried"))
        return KeptPlan(Profile.from_json(profile, graph), Plan.from_json(plan, graph), notes, untried)
    except (ValidationError, BaechiError):
        return None


def keep_plan(cache: Path, key: str, kept: KeptPlan, made_by: MadeBy) -> str:
    """Writes the plan, in place of the one before; the reason where that was not possible, else nothing."""
    entry = {**vars(kept), "profile": kept.profile.to_json(), "plan": kept.plan.to_json()}
    return keep_entry(cache, _FILE, key, signed(entry, made_by))
