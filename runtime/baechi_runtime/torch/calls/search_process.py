"""The search for a call's plan in a process of its own, while training goes on unplaced: it fills the plan cache, where the call finds it.

`python -m baechi_runtime.torch.calls.search_process` reads one line of JSON from stdin, and ends with the process that started it, however
that ended. It loads no framework.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from baechi_ext.cost import Profile
from baechi_ext.errors import BaechiError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.place.common import PlaceOptions, Worth
from baechi_ext.python_process import command_of, surroundings
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.costing import with_costs
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.torch.calls.plan_cache import KeptPlan, keep_plan

_OPTIONS = ("seed", "sct_threshold", "time_limit_seconds", "traversal_order", "placeto_policy", "placeto_episodes", "fits")
_NICENESS = 5
"""Training goes first where cores are short."""


class Search:
    """A search under way, for what `asked` says: see `search`."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            command_of(__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the training's
            text=True,
            env=surroundings(),
        )
        # What a pipe holds is less than a graph, and the process has to start before it reads.
        self._writer = threading.Thread(target=self._write, args=(json.dumps(asked),), daemon=True)
        self._writer.start()

    def _write(self, asked: str) -> None:
        try:
            self._process.stdin.write(asked + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        except (OSError, ValueError):  # it is gone, which `is_running` says
            return

    def is_running(self) -> bool:
        """True until the plan is kept, or the search has failed."""
        if self._process.poll() is None:
            return True
        self._close()
        return False

    def stop(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        self._writer.join()
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]


def plan_to_json(request: PlanRequest) -> dict[str, Any]:
    """The choices of a request that a search in another process can be told."""
    options = request.options
    value = {name: getattr(options, name) for name in _OPTIONS}
    value["worth"] = None if options.worth is None else asdict(options.worth)
    return {"method": request.method, "grouper": request.grouper, "placer_type": request.placer_type, "options": value}


def plan_from_json(value: dict[str, Any]) -> PlanRequest:
    """The request with these choices."""
    options = {**value["options"], "worth": None if value["options"]["worth"] is None else Worth(**value["options"]["worth"])}
    return PlanRequest(value["method"], value["grouper"], value["placer_type"], options=PlaceOptions(**options))


def is_serializable(request: PlanRequest) -> bool:
    """True if another process can search for what is requested: nothing in it is from a person's files, hints or pins."""
    return plan_from_json(plan_to_json(request)) == request


def search(asked: dict[str, Any]) -> None:
    """Finds the plan and keeps it. Raises what baechi_runtime.drivers.pipeline's `plan` raises."""
    graph, request = OpGraph.from_json(asked["graph"]), plan_from_json(asked["plan"])
    profile, cluster = Profile.from_json(asked["profile"], graph), Cluster.from_json(asked["cluster"])
    costs = with_costs(graph, profile, len(cluster), asked["host"])
    single = one_device_timeline(costs.alone, cluster.devices[0].speed)
    result = pipeline.plan(costs.graph, cluster, request)
    result = pipeline.whole_if_faster(result, costs.graph, cluster, request, single)
    kept = KeptPlan(profile, result.plan, result.notes, result.untried)
    if reason := keep_plan(Path(asked["cache"]), asked["key"], kept, MadeBy(tuple(asked["command"]))):
        raise BaechiError(reason)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    """See above."""
    os.nice(_NICENESS)
    asked = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    search(asked)


if __name__ == "__main__":
    main()
