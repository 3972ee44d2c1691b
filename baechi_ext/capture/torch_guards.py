"""Guards of calls that TorchDynamo compiled: what it does not look at itself. Private torch, as torch_dynamo.py.

TorchDynamo drops what is raised in a guard: `baechi_runtime.host.interrupts` lets Ctrl-C wait for the end of those of this file, and what
handlers of other signals raise in them is kept for whoever made the call.
"""

import collections
import logging
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any, NoReturn

from baechi_ext.capture.torch_private import needed
from baechi_ext.errors import CaptureError

if TYPE_CHECKING:
    import torch

_GUARDED = (int, float, str, bool, tuple, list, dict, set, frozenset, type(None))
"""Types of values that TorchDynamo guards itself where a class holds them."""


class _Raised(threading.local):
    """The last error that came up in a guard of the thread."""

    error: BaseException | None = None


_raised = _Raised()


class _Refused(threading.local):
    """Says that the guard which the thread makes is refused by us."""

    now = False


_refused = _Refused()


def _raise(error: CaptureError) -> NoReturn:
    raise error


def guard_the_unguarded(
    classes: "Iterable[type]", modules: "Sequence[torch.nn.Module]" = (), refuse: Callable[[CaptureError], NoReturn] = _raise
) -> None:
    """Have TorchDynamo trace the frame that it compiles now once more where something changes that it does not look at itself.

    That is: hooks of these modules, of which the first has all others, of modules that the frame may be given instead, and those for the
    calls of all; with an older torch, which of their parameters need gradients; members of these classes and of those that they come from,
    the sign of a zero, which object an `object()` is, and the order of an OrderedDict. For a frame with what no guard helps against
    `refuse` raises an error, with which it is not compiled. Does nothing outside of a trace. Raises MissingBackendError.
    """
    with needed("guarding a compiled call"):
        import torch
        from torch._dynamo.source import GlobalStateSource
        from torch._guards import Guard, TracingContext
    context = TracingContext.try_get()
    if context is None:
        return
    guards, strict = context.guards_context.dynamo_guards, partial(_strict, refuse)
    logging.getLogger("torch._guards").addFilter(_is_not_refused)
    _refused.now = False
    own = {base for kind in classes for base in kind.__mro__ if not base.__module__.startswith(("torch.", "builtins", "abc"))}
    for guard in list(guards):
        guards.add(Guard(guard.originating_source, strict))
        if modules and guard.create_fn_name() == "EMPTY_NN_MODULE_HOOKS_DICT":
            guards.add(Guard(guard.originating_source, partial(_without_hooks, modules[0], {id(m) for m in modules})))
    unguarded: list[tuple[Callable[[object], bool], str]] = [
        (_GlobalHooks(), "hooks of all modules"),
        (_Members(own), "members of modules' classes"),
        (_Hooks(modules), "hooks of modules"),
    ]
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        unguarded.append((_Gradients(modules), "parameters that need gradients"))
    for holds, what in unguarded:
        guards.add(Guard(GlobalStateSource(), _on_frame(holds, what)))


def take_raised() -> BaseException | None:
    """The last error that has come up in a guard of this thread since this was asked; TorchDynamo took the guard for one that failed."""
    error, _raised.error = _raised.error, None
    return error


def _keeping(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A guard whose errors are kept for `take_raised`."""

    def keeping(value: Any) -> bool:
        try:
            return holds(value)
        except BaseException as e:
            _raised.error = e
            raise

    return keeping


def _on_frame(holds: Callable[[object], bool], what: str) -> Callable[[Any, Any], None]:
    """A guard of the whole frame."""

    def make(builder: Any, _: Any) -> None:
        builder.guard_manager.root.add_lambda_guard(_keeping(holds), [what], None)

    return make


def guard_hooks() -> None:
    """Have TorchDynamo itself guard the hooks of modules, in all that this process traces from now on."""
    with needed("guarding a compiled call"):
        from torch._dynamo import config
    config.skip_nnmodule_hook_guards = False


class _GlobalHooks:
    """Says whether the hooks for the calls of all modules are those that there were."""

    def __init__(self) -> None:
        from torch.nn.modules import module

        names = sorted(name for name in vars(module) if name.startswith("_global_"))
        self._registries = [registry for registry in map(vars(module).get, names) if isinstance(registry, dict)]
        self._before = self._now()

    def __call__(self, _: object) -> bool:
        return self._now() == self._before

    def _now(self) -> list[tuple[int, ...]]:
        return [(k, *map(id, registry.values())) for k, registry in enumerate(self._registries) if registry]


class _Members:
    """Says whether classes have the members that they had: of those that TorchDynamo has no guard of its own for, the very objects."""

    def __init__(self, classes: Iterable[type]) -> None:
        self._spaces = []
        for space in map(vars, classes):
            names = [n for n, v in space.items() if not isinstance(v, _GUARDED)]
            # Twice the first, so that it is a tuple of values however many there are.
            read = itemgetter(*names[:1], *names) if names else None
            self._spaces.append((space, frozenset(space), read, () if read is None else read(space)))

    def __call__(self, _: object) -> bool:
        return all(
            space.keys() == names and (read is None or all(map(is_, read(space), values))) for space, names, read, values in self._spaces
        )


class _Hooks:
    """Says whether modules have the hooks that they had. TorchDynamo's own guards on these take as long as all its others together."""

    def __init__(self, modules: "Iterable[torch.nn.Module]") -> None:
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        self._registries = [registry for m in modules for kind in kinds if (registry := vars(m).get(kind)) is not None]
        self._sizes = list(map(len, self._registries))
        self._filled = [(registry, tuple(registry)) for registry in self._registries if registry]

    def __call__(self, _: object) -> bool:
        return list(map(len, self._registries)) == self._sizes and all(tuple(now) == before for now, before in self._filled)


class _Gradients:
    """Says whether the parameters that needed gradients are those that do. TorchDynamo looks at that itself from torch 2.13 on."""

    def __init__(self, modules: "Iterable[torch.nn.Module]") -> None:
        self._registries = [m._parameters for m in modules if m._parameters]
        self._before = self._now()

    def __call__(self, _: object) -> bool:
        return self._now() == self._before

    def _now(self) -> list[bool]:
        return [p is not None and p.requires_grad for registry in self._registries for p in registry.values()]


def _without_hooks(first: "torch.nn.Module", known: Collection[int], builder: Any, guard: Any) -> None:
    """Guards that a module has no hooks, as TorchDynamo does if it is told to. At those with `known` ids that are reached through the first
    of them `_Hooks` looks; layers in a plain list are not registered, and other frames, such as a layer's forward, are run for one layer
    after the other of a class."""
    source = guard.originating_source
    try:
        owner = builder.get(type(guard)(source.base, _strict))
        while hasattr(source, "base"):
            source = source.base
        root = builder.get(type(guard)(source, _strict))
    except Exception:  # noqa: BLE001 - of a source that can't be read there is nothing to add
        return
    if id(owner) not in known or getattr(root, "__self__", root) is not first:
        builder.SEQUENCE_LENGTH(guard)


def _is_not_refused(_: object) -> bool:
    return not _refused.now


def _strict(refuse: Callable[[CaptureError], NoReturn], builder: Any, guard: Any) -> None:
    """Guards on a value what TorchDynamo's own guards on it overlook."""
    try:
        value = builder.get(guard)
    except Exception:  # noqa: BLE001 - of a source that can't be read there is nothing to add
        return
    if type(value) is collections.deque and value.maxlen is not None:
        _refused.now = True  # TorchDynamo would log it as an error of its own
        refuse(CaptureError(f"forward uses a deque of limited length ({guard.name}), which TorchDynamo takes for one without a limit"))
    if type(value) is float and value == 0.0:
        sign = math.copysign(1, value)
        builder.get_guard_manager(guard).add_lambda_guard(_keeping(lambda v: math.copysign(1, v) == sign), [f"sign of {guard.name}"], None)
    elif type(value) is object:
        builder.get_guard_manager(guard).add_lambda_guard(_keeping(lambda v: v is value), [f"identity of {guard.name}"], None)
    elif type(value) is collections.OrderedDict and len(value) > 1:
        keys, held = list(value), weakref.ref(value)

        def in_order(_: object) -> bool:
            now = held()
            return now is None or list(now) == keys

        builder.guard_manager.root.add_lambda_guard(_keeping(in_order), [f"order of {guard.name}"], None)
