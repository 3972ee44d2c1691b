"""What a captured call of a module took for granted: parameters, buffers, training flags, hooks, and the attributes Python code reads."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from baechi_ext.errors import CaptureError

_OWN = frozenset(vars(nn.Module()))
"""Attributes of nn.Module itself; `training` apart, they are looked at one by one."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FEW = 64
"""Longer lists are told apart by their length alone."""
SETTLING = 2
"""So many calls may change the module's attributes, as where forward makes a table at first use."""
_DEPTH = 2
"""Lists in lists are looked into so deep."""
_CONTAINERS = (list, set, dict, deque)


class Attributes:
    """The attributes of a module and its children as they are now, and what is in the lists, dicts and sets among them."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = [(vars(m), dict(vars(m))) for m in module.modules()]
        own = (v for _, before in self._attributes for name, v in before.items() if name not in _OWN)
        self._contents = [(container, copy(container)) for v in own for container in _containers(v, _DEPTH)]

    def restore(self) -> None:
        for now, before in self._attributes:
            now.clear()
            now.update(before)
        for container, before in self._contents:
            container.clear()
            (container.update if isinstance(container, (set, dict)) else container.extend)(before)


def _containers(value: Any, depth: int) -> Iterator[Any]:
    if depth and isinstance(value, _CONTAINERS):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item, depth - 1)


class ModuleWatch:
    """A module as it is now. `changes` says what is different later."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = [_Watched(name, m) for name, m in module.named_modules()]

    def holds(self) -> bool:
        """Whether nothing changed."""
        return all(m.holds() for m in self._modules)

    def changes(self) -> list[str]:
        """What changed, each as "module.attribute"."""
        return [f"{m.name}.{what}" if m.name else what for m in self._modules if not m.holds() for what in m.changes()]


def keeps_changing(changed: Sequence[str]) -> CaptureError:
    """The error of a module whose forward changes these attributes in every call."""
    return CaptureError(
        f"forward changes attributes of the module ({', '.join(changed[:5])}), which a captured call can't; return them, or "
        "keep tensors in buffers that forward changes in place (self.name.copy_(...))"
    )


class _Watched:
    """One module, without its children."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self._attributes = vars(module)
        self._names = [n for n in self._attributes if n not in _OWN or n == "training"]
        # Twice the first, so that it is a tuple of values however many there are.
        self._get = itemgetter(*self._names[:1], *self._names) if self._names else lambda _: ()
        self._values = self._get(self._attributes)
        self._count = len(self._attributes)
        self._contents = {n: frozen for n in self._names if (frozen := _frozen(self._attributes[n])) is not None}
        self._tensors = {kind: dict(self._attributes[kind]) for kind in ("_parameters", "_buffers", "_modules")}
        self._trained = [(p, p.requires_grad) for p in self._attributes["_parameters"].values() if p is not None]
        self._hooks = [(self._attributes[kind], tuple(self._attributes[kind])) for kind in _HOOKS]

    def holds(self) -> bool:
        attributes = self._attributes
        try:
            if self._count != len(attributes) or self._get(attributes) != self._values:
                return False
        except (KeyError, RuntimeError, ValueError):  # gone, or compared element by element
            return False
        if any(p.requires_grad is not trained for p, trained in self._trained) or any(len(h) != len(k) for h, k in self._hooks):
            return False
        if any(not _same(attributes[kind], members) for kind, members in self._tensors.items()):
            return False
        return all(_frozen(attributes[n]) == frozen for n, frozen in self._contents.items())

    def changes(self) -> list[str]:
        now, found = self._attributes, []
        for name, before in zip(self._names, self._values[1:], strict=True):
            same = name in now and (now[name] is before or _equal(now[name], before))
            if not same or (name in self._contents and _frozen(now[name]) != self._contents[name]):
                found.append(name)
        found += [n for n in now if n not in _OWN and n not in self._names]
        for members, before in ((now[kind], before) for kind, before in self._tensors.items()):
            found += [n for n in {**members, **before} if members.get(n) is not before.get(n)]
        trained = {id(p): flag for p, flag in self._trained}
        switched = [n for n, p in now["_parameters"].items() if p is not None and p.requires_grad is not trained.get(id(p))]
        found += [f"{n}.requires_grad" for n in switched]
        return found or ["hooks"]


def _same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now.values(), before.values(), strict=True))


def _equal(a: Any, b: Any) -> bool:
    try:
        return type(a) is type(b) and bool(a == b)
    except (RuntimeError, ValueError, TypeError):
        return False


def _frozen(value: Any, depth: int = _DEPTH) -> Any:
    """What tells that a mutable value was changed in place; None where it is not looked into."""
    if isinstance(value, torch.Tensor):
        return value._version
    if isinstance(value, _CONTAINERS):
        if len(value) > _FEW:
            return len(value)
        items = value.items() if isinstance(value, dict) else value
        return tuple(_item(i, depth - 1) for i in items)
    return None


def _item(value: Any, depth: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_item(v, depth) for v in value)
    if depth and isinstance(value, _CONTAINERS):
        return id(value), _frozen(value, depth)
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)
