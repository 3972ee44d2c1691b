"""The user's variables while their values live on the devices of a placed step.

After a placed step the values here are old. A variable that is read or assigned then, op by op or by any tf.function that uses it, is
brought home first, alone or with the function's other ones; so nobody sees an old value, and what nobody looks at is not sent. What was
changed here meanwhile is sent to the devices before the next placed step. Functions of data sets alone read variables unasked, in threads
of TensorFlow's, so a variable that one of them has may not be away.
"""

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
import tensorflow as tf

from baechi_ext.capture.tensorflow_private import resources_of
from baechi_ext.errors import CaptureError

Fetch = Callable[[Sequence[str]], Mapping[str, np.ndarray]]
"""Names -> the values of these variables, from the devices."""

_lock = threading.RLock()
_away: dict[int, tuple["LiveVariables", str]] = {}
"""Variables that are not here, by the identity of their handles: whose they are, and their names there."""
_read_by: weakref.WeakKeyDictionary[tf.data.Dataset, list[Any]] = weakref.WeakKeyDictionary()
"""Data sets whose functions read variables, and the handles of these."""
_classes_away: dict[type, type] = {}
_classes_home: dict[type, type] = {}
_ONE_BY_ONE = 4
"""Number of variables that are brought one by one, as the learning rate is in every step; then all are, as where a model is saved."""


class LiveVariables:
    """The variables of one placed step, by the names they have on its devices."""

    def __init__(self, variables: Mapping[str, tf.Variable], fetch: Fetch) -> None:
        _watch_functions()
        watch_data_sets()
        self._variables = dict(variables)
        self._fetch = fetch
        self._known: dict[str, np.ndarray] = {}
        """The devices' values of the variables that are here."""

    def changes(self) -> dict[str, np.ndarray]:
        """The variables that are here and have other values than the devices have; all of them, the first time. A variable that lives on
        the devices of another placed step is brought home."""
        with _lock:
            elsewhere = [v for n, v in self._variables.items() if self._owner(v) not in (None, self)]
        bring_home(elsewhere)
        values = {n: v.numpy() for n, v in self._variables.items() if self._owner(v) is None}
        return {n: x for n, x in values.items() if n not in self._known or self._known[n].tobytes() != x.tobytes()}

    def require_unread(self, step: str) -> None:
        """Raises CaptureError where a data set's function reads one of the variables."""
        read = {id(handle) for handles in _read_by.copy().values() for handle in handles}
        for name in (n for n, v in self._variables.items() if read and id(_handle(v)) in read):
            raise CaptureError(
                f"{step} uses the variable {name!r}, which a function of a data set reads, too; give the step the elements "
                "without it, and let the step do what the function does"
            )

    def leave(self) -> None:
        """Leaves the values to the devices from now on; what is here is old."""
        with _lock:
            self._known.clear()
            for name, variable in self._variables.items():
                if self._owner(variable) is None:
                    _away[id(_handle(variable))] = (self, name)
                    variable.__class__ = _class_away(type(variable))

    def bring(self, names: Sequence[str]) -> None:
        """Makes the values here those of the devices."""
        with _lock:
            if len(self._known) + len(names) > _ONE_BY_ONE:
                names = list(self._variables)
            names = [n for n in names if self._owner(self._variables[n]) is self]
            values = self._fetch(names) if names else {}
            with tf.init_scope():  # whoever asked may be tracing, or recording gradients
                for name in names:
                    variable = self._variables[name]
                    tf.raw_ops.AssignVariableOp(resource=_handle(variable), value=tf.convert_to_tensor(values[name], variable.dtype))
            self._are_here(names)  # only now: an interrupt amid this finds old values still taken for old
            self._known |= {n: values[n] for n in names}

    def bring_all(self) -> None:
        self.bring(list(self._variables))

    def forget(self) -> None:
        """Forgets the devices' values: those here count from now on, old as they are."""
        with _lock:
            self._known.clear()
            self._are_here([n for n, v in self._variables.items() if self._owner(v) is self])

    def _are_here(self, names: Sequence[str]) -> None:
        for variable in map(self._variables.__getitem__, names):
            variable.__class__ = _classes_home[type(variable)]
            del _away[id(variable.handle)]

    def assign(self, name: str, value: Any) -> None:
        """Makes a value that one of the variables has, here and on the devices before the next step; that of the devices may be lost."""
        with _lock:
            tf.raw_ops.AssignVariableOp(resource=_handle(self._variables[name]), value=value)
            self._are_here([name])

    def _owner(self, variable: tf.Variable) -> "LiveVariables | None":
        found = _away.get(id(_handle(variable)))
        return None if found is None else found[0]


def others_wait() -> AbstractContextManager[bool]:
    """Within, other threads that look at a variable that is away wait: amid a step they would bring home an old value, to stay."""
    return _lock


def bring_home(variables: Iterable[tf.Variable]) -> None:
    """Brings home those of the variables that are away, in one request for each placed step."""
    _bring(map(_handle, variables))


def _bring(handles: Iterable[Any]) -> None:
    with _lock:
        by_owner: dict[LiveVariables, list[str]] = {}
        for owner, name in (_away[id(h)] for h in handles if id(h) in _away):
            by_owner.setdefault(owner, []).append(name)
        for owner, names in by_owner.items():
            owner.bring(names)


def _handle(variable: tf.Variable) -> Any:
    """Its handle, without bringing it home."""
    home: Any = _classes_home.get(type(variable), type(variable))
    return vars(variable)["_handle"] if "_handle" in vars(variable) else home.handle.fget(variable)


def _class_away(home: Any) -> type:
    """Like the variable's own class, but whoever asks for the handle, as all reading and writing does, has the variable brought home; ops
    that are given a variable ask for `_handle`. Where it is assigned as a whole, or restored from a checkpoint, nobody asks the devices,
    which may be gone."""
    if home not in _classes_away:

        def handle(variable: Any) -> Any:
            found = _handle(variable)
            _bring([found])
            return found

        def set_handle(variable: Any, value: Any) -> None:
            vars(variable)["_handle"] = value

        def device(variable: Any) -> Any:
            return _handle(variable).device

        def give(variable: Any, value: Any) -> None:
            with _lock:
                if tf.executing_eagerly() and id(_handle(variable)) in _away:
                    value = tf.convert_to_tensor(value, variable.dtype)  # may be of another variable, which brings all home
                    owner, name = _away.get(id(_handle(variable)), (None, ""))
                    if owner is not None and variable.shape.is_compatible_with(value.shape):  # else it is an error, and changes nothing
                        owner.assign(name, value)

        def assign(variable: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            give(variable, value)
            return home.assign(variable, value, *args, **kwargs)

        def restore(variable: Any, tensors: Mapping[str, Any]) -> Any:
            give(variable, *tensors.values())
            return home._restore_from_tensors(variable, tensors)

        asked = {"handle": property(handle), "_handle": property(handle, set_handle)}
        unasked = {"device": property(device), "assign": assign, "_restore_from_tensors": restore}
        _classes_away[home] = type(home.__name__, (home,), {**asked, **unasked, "__module__": home.__module__})
        _classes_home[_classes_away[home]] = home
    return _classes_away[home]


def watch_data_sets() -> None:
    """From now on it is known which data sets have functions that read variables, of those that are there already, too."""
    make = tf.data.Dataset.__init__
    if getattr(make, "is_watched", False):
        return

    def init(dataset: tf.data.Dataset, *args: Any, **kwargs: Any) -> None:
        make(dataset, *args, **kwargs)
        note(dataset)

    def note(dataset: tf.data.Dataset) -> None:
        if found := resources_of(dataset):
            _read_by[dataset] = found

    init.is_watched = True  # type: ignore[attr-defined]
    tf.data.Dataset.__init__ = init
    for dataset in [o for o in gc.get_objects() if tf.data.Dataset in type(o).__mro__]:
        with suppress(AttributeError):  # of one that is not made yet
            note(dataset)


def _watch_functions() -> None:
    """Compiled functions have the handles of their variables from when they were traced; they bring them home when they are called."""
    kind = type(tf.function(lambda: tf.constant(0)).get_concrete_function())
    given = kind.captured_inputs
    if getattr(given.fget, "brings_home", False):
        return

    def captured_inputs(function: Any) -> Any:
        found = given.fget(function)
        if _away:
            _bring(found)
        return found

    captured_inputs.brings_home = True  # type: ignore[attr-defined]
    kind.captured_inputs = property(captured_inputs, doc=given.__doc__)
