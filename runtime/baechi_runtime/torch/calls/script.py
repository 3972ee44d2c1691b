"""Running a user's own training script, unmodified, with its model placed.

The script runs as `python SCRIPT ARGUMENTS` would run it. While it does, a call of a module from outside any other module's call is
looked at: where the module trains and is large enough, its calls are placed (baechi_runtime.torch.calls.session).
"""

import gc
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from baechi_ext.capture.torch_private import is_traced
from baechi_ext.collector import importing
from baechi_ext.errors import BaechiError
from baechi_runtime.drivers.script_run import ScriptRun
from baechi_runtime.drivers.train_request import ScriptRequest, TrainRequest
from baechi_runtime.files.run_folder import KeptStep
from baechi_runtime.host.fork_lock import ForkLock
from baechi_runtime.report.call_report import CallReport
from baechi_runtime.torch.backend import devices_of
from baechi_runtime.torch.calls.call_report import kept_step, report_of
from baechi_runtime.torch.calls.fragments import Settings
from baechi_runtime.torch.calls.module_call import COMPILED, ModuleCall, compiled_by_others
from baechi_runtime.torch.calls.module_calls import LARGE_ENOUGH, Call, outermost_calls, trained_size
from baechi_runtime.torch.calls.parallelize import executor_of
from baechi_runtime.torch.calls.session import Session
from baechi_runtime.torch.calls.tracing import watch_compiles
from baechi_runtime.torch.calls.workers import Workers, join_workers
from baechi_runtime.torch.processes.environment import as_if_alone

_CALL = "_baechi_call"
"""The attribute of a module that holds its placed call; copies and pickles of the module have none. nn.Module's own, `_compiled_call_impl`,
would break TorchDynamo's traces of other modules that call this one."""
MOST_MODULES = 4
"""The most modules of a script that are placed, such as a generator and a discriminator."""


@dataclass
class ModulesRun(ScriptRun[Session]):
    """The outcome of a script of PyTorch."""

    kind = "modules"
    left_out: dict[str, str] = field(default_factory=dict)
    """The classes of other modules that are large enough -> why placing them is not tried."""

    def found(self, placed: Session) -> tuple[CallReport, KeptStep | None]:
        report = report_of(placed)
        return report, kept_step(placed, self.name, report)

    def lines(self) -> list[str]:
        return super().lines() + [f"{name}: not placed; {why}" for name, why in self.left_out.items() if self.placed]

    def why_nothing(self) -> str:
        for name, why in self.left_out.items():
            return f"{name}: {why}"
        if self.too_small:
            return f"the largest module that trained has {self.too_small} parameters, fewer than {LARGE_ENOUGH}"
        return "no module was called in training mode (model.train()) while gradients were recorded"


def run_script(asked: ScriptRequest) -> ModulesRun:
    """Runs the script to its end; an exception of its own is shown as Python shows it, and its exit code is 1.

    Raises what placing its model raises, and KeyboardInterrupt.
    """
    with importing():
        watch_compiles()
    workers = workers_of(asked.request)
    run = ModulesRun(reports=workers is None or workers.group.rank == 0)

    def conclude() -> None:
        for session in run.placed:
            session.conclude(ended=True)

    try:
        with as_one_of(workers), states_without_calls(), outermost_calls(_Placing(asked, run).runner):
            run.main(asked, conclude)
    except (BaechiError, KeyboardInterrupt):  # the others, amid their calls, do not say goodbye
        if workers is not None:
            workers.failed = True
        raise
    return run


def workers_of(request: TrainRequest) -> Workers | None:
    """The workers that run the script together; None where this process runs it alone."""
    return join_workers(request.num_devices, request.timeout_seconds) if request.workers == "process" else None


@contextmanager
def as_one_of(workers: Workers | None) -> Iterator[None]:
    """Every worker runs the script as if it were alone, with the same random numbers, worker 0's; what the others print is lost."""
    if workers is None:
        yield
        return
    seed = workers.share([torch.tensor(torch.initial_seed() % 2**32)], [torch.tensor(0)], 0)[0].item()
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    with as_if_alone(), ExitStack() as stack:
        if workers.group.rank:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w", encoding="utf-8"))))
        yield


@contextmanager
def states_without_calls() -> Iterator[None]:
    """While it is entered, what is copied or pickled of a module has no placed call: a file of it can be loaded by
    torch.load(weights_only=True) with the script's own classes as safe globals."""
    plain: Callable[[nn.Module], dict[str, Any]] = nn.Module.__getstate__

    def state(module: nn.Module) -> dict[str, Any]:
        return {name: value for name, value in plain(module).items() if name != _CALL}

    nn.Module.__getstate__ = state  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__getstate__ = plain  # type: ignore[method-assign]


class _Placing:
    """Calls of modules while the script runs."""

    def __init__(self, asked: ScriptRequest, run: ModulesRun) -> None:
        self._asked = asked
        self._run = run
        self._lock = ForkLock()
        self._modules: list[weakref.ref[nn.Module]] = []
        """Those that are placed. A call belongs to its module, so that both end where the script holds the module no more."""
        self._in_vain = 0
        """Calls of further modules since a place was last found free."""
        self._waited: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        """Calls of modules that get no place because others of their class had theirs in vain."""

    def runner(self, module: nn.Module, ordinary: Call) -> Call:
        """Return the function to run for a module's call."""
        with self._lock:
            known = module.__dict__.get(_CALL)
            return known if known is not None and known.is_of(module) else self._runner_of_new(module, ordinary)

    def _runner_of_new(self, module: nn.Module, ordinary: Call) -> Call:
        if is_traced():  # torch.jit.trace would record what is asked of parameters here
            return ordinary
        size = trained_size(module)
        if size < LARGE_ENOUGH:
            self._run.too_small = max(size, self._run.too_small)
            return ordinary
        if compiled_by_others(module):
            self._run.left_out[type(getattr(module, "_orig_mod", module)).__name__] = COMPILED
            return ordinary
        if not self._has_place():
            self._run.left_out[type(module).__name__] = f"{MOST_MODULES} modules of a script are, at most"
            return ordinary
        if why := self._why_in_vain(module):
            self._run.left_out[type(module).__name__] = why
            return ordinary
        self._run.left_out.pop(type(module).__name__, None)
        call = ModuleCall(module, ordinary, self._settings())
        module.__dict__[_CALL] = call
        self._modules.append(weakref.ref(module))
        self._run.placed.append(call.session)
        return call

    def _has_place(self) -> bool:
        """True if the script holds fewer modules that are placed than may be.

        Who still holds them takes a collection to know, which takes as long as many a step. So with each one that was in vain the next
        is twice as many calls away. These are counted, and nothing is forgotten in between, since worker processes have to agree.
        """
        if len(self._modules) < MOST_MODULES:
            return True
        self._in_vain += 1
        if self._in_vain & (self._in_vain - 1):
            return False
        gc.collect()
        self._modules = [module for module in self._modules if module() is not None]
        if len(self._modules) == MOST_MODULES:
            return False
        self._in_vain = 0
        return True

    def _why_in_vain(self, module: nn.Module) -> str:
        """The reason why a module gets no place: others of its class, as copies for a task each, were set up in vain, and it has not been
        called twice as often as any of these. Empty where it gets one.

        When a module ends depends on collections, of which worker processes have their own.
        """
        if self._asked.keep_placed or self._asked.strict or self._asked.request.workers == "process":
            return ""
        alike = [placed for placed in self._run.placed if placed.name == type(module).__name__]
        ended = [placed.calls for placed in alike if placed.module() is None and not placed.pays]
        if len(ended) < MOST_MODULES:
            return ""
        self._waited[module] = waited = self._waited.get(module, 0) + 1
        if waited > 2 * max(ended):
            return ""
        return f"{len(ended)} others of its class ended before placing them was seen to pay; --keep_placed places them all"

    def _settings(self) -> Settings:
        asked, request = self._asked, self._asked.request
        executor = workers_of(request) or executor_of(devices_of(request), request.timeout_seconds, graphs=request.as_graphs)
        return Settings(request, executor, asked.verify_steps, asked.strict, asked.keep_placed, record=request.out is not None)
