"""Plans and the profiles they were made with, kept from run to run: the same graph on the same machine is neither measured nor searched
again.

An entry is three files: KEY.profile.json.gz and KEY.plan.json.gz, in the formats of those, and KEY.json. All have the same word, another
one each time an entry is written: so what two processes wrote at once, or one left half done, is no entry. What gzip takes for damaged is
none either.
"""

import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baechi_ext.cost import Profile
from baechi_ext.errors import BaechiError, FileError
from baechi_ext.ir.files import SCHEMA_VERSION, read_json, write_json
from baechi_ext.ir.made_by import MadeBy, signed
from baechi_ext.ir.numbers import as_number
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.ir.plan import Plan
from baechi_runtime.host.cache_folder import is_fresh, open_folder, touch, trim

_FOLDER = "plans"
_PARTS = ("profile", "plan")
_WORD = "entry"


@dataclass(frozen=True)
class KeptPlan:
    """A plan and its costs, and what was said of them."""

    profile: Profile
    plan: Plan
    notes: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    setup_seconds: float = 0.0
    """Seconds spent measuring the costs and finding the plan."""


class PlanCache:
    """The plans in a cache's folder. Never fails: what can't be read is not there, what can't be written is not kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / _FOLDER

    def find(self, key: str, graph: OpGraph) -> KeptPlan | None:
        """The entry of this key, of `graph`; None where there is none, it is old, or not as it was written."""
        try:
            record = read_json(self._record(key), "record")
            profile, plan = (read_json(self._file(key, part), part) for part in _PARTS)
            if record.get("key") != key or not is_fresh(record.get("kept_seconds")):
                return None
            if not isinstance(record.get(_WORD), str) or any(value.get(_WORD) != record[_WORD] for value in (profile, plan)):
                return None
            return KeptPlan(
                Profile.from_json(profile, graph),
                Plan.from_json(plan, graph),
                _texts(record.get("notes")),
                _texts(record.get("untried")),
                as_number(record.get("setup_seconds"), "setup_seconds", FileError),
            )
        except (BaechiError, OSError):
            return None

    def used(self, key: str) -> None:
        """Notes that an entry was of use."""
        touch(self._record(key))

    def keep(self, key: str, kept: KeptPlan, made_by: MadeBy) -> str:
        """Writes the entry, in place of the one before; the reason where that was not possible, else nothing."""
        if reason := open_folder(self.folder):
            return reason
        word = {_WORD: uuid.uuid4().hex}
        try:
            write_json(self._file(key, "profile"), signed(kept.profile.to_json() | word, made_by))
            write_json(self._file(key, "plan"), signed(kept.plan.to_json() | word, made_by))
            record = {
                "schema_version": SCHEMA_VERSION,
                **word,
                "key": key,
                "kept_seconds": time.time(),
                "setup_seconds": kept.setup_seconds,
                "notes": list(kept.notes),
                "untried": list(kept.untried),
            }
            write_json(self._record(key), signed(record, made_by))
        except (FileError, OSError) as e:
            return str(e)
        trim(self.folder)
        return ""

    def _record(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _file(self, key: str, part: str) -> Path:
        return self.folder / f"{key}.{part}.json.gz"


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise FileError(f"{value!r} is not a list of strings; delete the entry")
    return tuple(value)
