"""The surroundings that a module reads from and writes to: environment, clock, streams, warnings, contexts, global switches."""

import contextvars
import gc
import io
import logging
import os
import threading
import time
import warnings
import weakref
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.hostile.suite import Net, Wrap, batches, case, seeded, sgd, state, train

SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE", default=1.0)
LOCAL = threading.local()
LOGGER = logging.getLogger("a.logger.of.the.user")


@case(lambda model: train(model, lambda step: os.environ.update(SCALE_OF_THE_LOSS=str(1.0 + step))))
class EnvironmentVariable(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(os.environ.get("SCALE_OF_THE_LOSS", "1"))


@case(lambda model: train(model, lambda step: SCALE.set(1.0 + step)))
class ContextVariable(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SCALE.get()


@case(lambda model: train(model, lambda step: setattr(LOCAL, "scale", 1.0 + step)))
class ThreadLocalNumber(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * LOCAL.scale


def clock_is_patched(wrap: Wrap) -> Any:
    ordinary, now = time.perf_counter, 0.0

    class Timed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1.0 + time.perf_counter())

    def tick(step: int) -> None:
        nonlocal now
        now = float(step)

    model = wrap(seeded(Timed))
    time.perf_counter = lambda: now
    try:
        return train(model, tick)
    finally:
        time.perf_counter = ordinary


def file_is_read_and_written(wrap: Wrap) -> Any:
    stream = io.StringIO()

    class Writing(Net):
        def forward(self, x: Tensor) -> Tensor:
            stream.write(f"{tuple(x.shape)};")
            return super().forward(x) / len(stream.getvalue())

    return train(wrap(seeded(Writing))), stream.getvalue()


@case
class PrintInForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        print("before", tuple(x.shape))
        out = super().forward(x)
        print("after", f"{out.sum().item():.4f}")
        return out


def logging_in_forward(wrap: Wrap) -> Any:
    records: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    class Logging(Net):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            LOGGER.info("call %d of %s", self.calls, tuple(x.shape))
            return super().forward(x)

    LOGGER.addHandler(Kept())
    return train(wrap(seeded(Logging)), {2: lambda: LOGGER.setLevel("INFO"), 5: lambda: LOGGER.setLevel("ERROR")}), records


def warning_in_forward(wrap: Wrap) -> Any:
    class Warning_(Net):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            warnings.warn(f"call {self.calls}", UserWarning, stacklevel=2)
            return super().forward(x)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(wrap(seeded(Warning_)))
    return found, [str(w.message) for w in caught if str(w.message).startswith("call ")]


def warning_becomes_an_error(wrap: Wrap) -> Any:
    class Warning_(Net):
        def forward(self, x: Tensor) -> Tensor:
            warnings.warn("of the user's own", FutureWarning, stacklevel=2)
            return super().forward(x)

    def strict() -> None:
        warnings.simplefilter("error", FutureWarning)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return train(wrap(seeded(Warning_)), {3: strict})


def context_manager_of_the_user(wrap: Wrap) -> Any:
    entered: list[str] = []
    depth = 0

    @contextmanager
    def deeper() -> Any:
        nonlocal depth
        depth += 1
        entered.append(f"in {depth}")
        try:
            yield depth
        finally:
            entered.append(f"out {depth}")

    class Deeper(Net):
        def forward(self, x: Tensor) -> Tensor:
            with deeper() as factor:
                return super().forward(x) / factor

    return train(wrap(seeded(Deeper))), entered


def activations_are_freed(wrap: Wrap) -> Any:
    alive: list[int] = []
    refs: list[Any] = []

    class Watched(Net):
        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x)
            refs.append(weakref.ref(hidden))
            return hidden

    def count(step: int) -> None:
        gc.collect()
        alive.append(sum(ref() is not None for ref in refs))

    model = wrap(seeded(Watched))
    optimizer = sgd(model)
    for step, (x, y) in enumerate(batches()):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        del loss
        count(step)
    return state(model), alive


def model_is_freed(wrap: Wrap) -> Any:
    given = seeded()
    ref = weakref.ref(given)
    weights = weakref.ref(given.first.weight)
    model = wrap(given)
    found = train(model)
    found["alive"] = ref() is not None
    del given, model
    gc.collect()
    return found, ref() is None, weights() is None


def weak_reference_is_read_in_forward(wrap: Wrap) -> Any:
    class Owner:
        scale = 2.0

    owner = Owner()
    reference = weakref.ref(owner)

    class Referring(Net):
        def forward(self, x: Tensor) -> Tensor:
            held = reference()
            return super().forward(x) * (held.scale if held is not None else 0.5)

    def drop(step: int) -> None:
        nonlocal owner
        if step == 1:
            owner.scale = 3.0
        if step == 3:
            owner = None
            gc.collect()

    return train(wrap(seeded(Referring)), drop)


def default_dtype_changes(wrap: Wrap) -> Any:
    class Making(Net):
        def forward(self, x: Tensor) -> Tensor:
            made = torch.ones(3) / 3
            return super().forward(x.float()) * made.sum().float() + (made.dtype == torch.float64)

    kept = list(batches())
    model = wrap(seeded(Making))
    found = []
    try:
        for step, (x, y) in enumerate(kept):
            torch.set_default_dtype(torch.float64 if step > 2 else torch.float32)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            found.append(loss.detach())
        return found, state(model)
    finally:
        torch.set_default_dtype(torch.float32)


def deterministic_algorithms_are_asked_for(wrap: Wrap) -> Any:
    class Asking(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2.0 if torch.are_deterministic_algorithms_enabled() else 1.0)

    try:
        return train(wrap(seeded(Asking)), {3: lambda: torch.use_deterministic_algorithms(True)})
    finally:
        torch.use_deterministic_algorithms(False)


@case(lambda given, model: train(model, {2: lambda: given.first.requires_grad_(False), 4: lambda: setattr(given, "more", nn.Linear(8, 8))}))
class ParameterCountIsReadInForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        trained = sum(p.numel() for p in self.parameters() if p.requires_grad)
        return super().forward(x) * (trained / 1000)


def identity_of_objects_decides(wrap: Wrap) -> Any:
    marks = [object(), object()]

    class Marked(Net):
        mark = marks[0]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1.0 if self.mark is marks[0] else 2.0)

    model = seeded(Marked)
    return train(wrap(model), lambda step: setattr(model, "mark", marks[step % 2]))
