"""The thread executor: one thread per device in this process, each running its static program; mailboxes hand tensors over."""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.errors import BaechiError, ExecutionError, first_line
from baechi_ext.ir import OpGraph
from baechi_ext.simulate import Timeline
from baechi_runtime.files.checkpoint_folder import Shard, verify_shard
from baechi_runtime.host.interrupts import raise_if_asked_for
from baechi_runtime.host.malloc import keep_freed_memory, mind_shortage
from baechi_runtime.measure.device_speeds import Pace
from baechi_runtime.measure.link_probe import PROBE_BYTES, LinkProbe
from baechi_runtime.measure.recording import DeviceMemory, Recording, recorded_run
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.torch.lowering.checkpoint import homes, living_on, owned, read_shards, write_shard
from baechi_runtime.torch.lowering.devices import TorchDevice, memory_bytes
from baechi_runtime.torch.lowering.link_player import Player, Wait, fitted, play_pace
from baechi_runtime.torch.lowering.op_error import OpFailure, explained
from baechi_runtime.torch.lowering.ops import Exchange, LoweredProgram, Lowering, Slots, StepContext
from baechi_runtime.torch.lowering.program import cut
from baechi_runtime.torch.threads.accounting import counting, resident_bytes
from baechi_runtime.torch.threads.step_recorder import NO_CUDA_TRANSFERS, DeviceLog, clock_of

T = TypeVar("T")
RunTogether = Callable[[Sequence[Slots]], Sequence[float]]
_STOPPING_SECONDS = 5.0
_PROBE_WARMUP, _PROBE_REPEATS = 5, 30


class Worker:
    """The thread of a device, or of several. Tasks are run in order; each has an answer of its own, so that nobody gets one that was given
    up."""

    def __init__(self, *devices: TorchDevice) -> None:
        self._devices = devices
        self.tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._loop, name=f"baechi {devices[0].name}", daemon=True)
        self.thread.start()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        answer: Future[T] = Future()
        self.tasks.put((task, answer))
        return answer

    def _loop(self) -> None:
        try:
            for device in self._devices:
                device.enter()
            broken = None
        except Exception as e:  # noqa: BLE001 - reported with the first task
            broken = e
        while (due := self.tasks.get()) is not None:
            task, answer = due
            try:
                if broken is not None:
                    raise broken
                answer.set_result(task())
            except BaseException as e:  # noqa: BLE001 - handed to the caller's thread
                answer.set_exception(e)
            del due, task, answer


class Mailboxes:
    """Boxes that hand tensors on from one device's thread to another's: one per tensor and destination, filled and emptied once a step.
    `abort` wakes every waiter with an ExecutionError; the boxes are useless after it."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._boxes: dict[tuple[int, int], queue.SimpleQueue[Any]] = {}
        self._aborted = False

    def _box(self, tensor: int, target: int) -> "queue.SimpleQueue[Any]":
        return self._boxes.setdefault((tensor, target), queue.SimpleQueue())

    def giver(self, tensor: int, target: int, gone: Callable[[], None] | None = None) -> Callable[[Any], None]:
        """A function that puts a value into the box of `tensor` at device `target`, and then calls `gone`."""
        put = self._box(tensor, target).put

        def give(value: Any) -> None:
            self._go_on()
            put(value)
            if gone is not None:
                gone()

        return give

    def taker(self, tensor: int, target: int) -> Callable[[], Any]:
        """A function that waits for the box to fill and empties it. It raises ExecutionError after the time-out or an abort."""
        get, timeout = self._box(tensor, target).get, self._timeout_seconds

        def take() -> Any:
            try:
                value = get(timeout=timeout)
            except queue.Empty:
                raise ExecutionError(
                    f"device {target} gave up waiting for tensor {tensor} after {timeout:g} s; raise --timeout if ops take that long"
                ) from None
            self._go_on()
            return value

        return take

    def _go_on(self) -> None:
        if self._aborted:
            raise ExecutionError("another device failed")

    def abort(self) -> None:
        """Wakes whoever waits now or later."""
        self._aborted = True
        for box in self._boxes.values():
            box.put(None)


class PlacedStep:
    """One plan's programs, loaded into an executor. `run` does one training step."""

    def __init__(
        self, executor: "ThreadExecutor", programs: Sequence[LoweredProgram], context: StepContext, timeline: Timeline
    ) -> None:
        self.executor = executor
        self.timeline = timeline
        self.context = context
        self.step = context.step
        self.optimizers = context.optimizers
        self.programs = tuple(programs)
        self._loss: torch.Tensor | None = None

    def run(self) -> tuple[torch.Tensor, StepTimes]:
        """The loss and the times of one step.

        Raises ExecutionError where an op fails or a device does not answer in time; the step can't be run again then.
        """
        begin = time.perf_counter_ns()
        busy = self._run()
        wall_us = (time.perf_counter_ns() - begin) / 1000
        if self._loss is None:
            raise ExecutionError("the step has no loss; no device ran the op that computes it")
        loss, self._loss = self._loss, None
        return loss, StepTimes(wall_us, tuple(busy))

    def _run(self) -> Sequence[float]:
        """Run the devices' programs, and take the loss; for how many microseconds each device was busy."""
        return self.executor.run_all([self._task(i) for i in range(len(self.programs))], on_failure=self.abort)

    def abort(self) -> None:
        """Tell devices that wait for others to stop."""
        cast(Mailboxes, self.context.mailboxes).abort()

    def gather(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The last step's gradients (where `load` was told to keep them), and the parameters and buffers as they are now, by name."""
        return dict(self.context.gradients or {}), self.step.state()

    @property
    def random_device(self) -> TorchDevice:
        """The device whose generator the step's random numbers are drawn from, one after the other."""
        seeded = self.context.binding.seeded_ops
        return self.executor.devices[self.timeline.placement[seeded[0]] if seeded else 0]

    def save(self, folder: Path) -> list[Shard]:
        """Every device writes what lives there into the folder: its shard of a checkpoint."""
        where, state = homes(self.context.binding, self.timeline.placement), self.step.state()
        parts = [living_on(device, where, state) for device in range(len(self.programs))]
        tasks = [partial(write_shard, folder, device, part, self.optimizers) for device, part in enumerate(parts)]
        return self.executor.run_all(tasks, on_failure=_nothing)

    def restore(self, checkpoint: Path, shards: Sequence[Shard]) -> None:
        """Takes up the parameters, buffers and optimizer state of a checkpoint, which may be of another plan. Raises CheckpointError."""
        for shard in shards:
            verify_shard(checkpoint, shard)
        read_shards(checkpoint, [shard.file for shard in shards], self.step.state(), self.optimizers)

    def peak_bytes(self) -> tuple[int, ...]:
        """Peak bytes of every device during one step, counted; see accounting."""
        return tuple(device.peak for device in self._held())

    def _held(self) -> list[DeviceMemory]:
        """Memory that each device holds during one real step."""
        timeline, state = self.timeline, self.step.state()
        live: list[list[tuple[int, int, int]]] = [[] for _ in self.programs]
        self._with([counting(p, timeline, state.values(), own) for p, own in zip(self.programs, live, strict=True)])._run()
        names = owned(self.context.binding, timeline.placement, len(self.programs))
        return [DeviceMemory(resident_bytes(own, state, self.optimizers), ops) for ops, own in zip(live, names, strict=True)]

    def record(self) -> Recording:
        """A few more steps, recorded, the one of the median time kept; and one in which memory is counted. The state goes on with them."""
        executor, context = self.executor, self.context
        devices = executor.devices[: len(self.programs)]
        logs = [DeviceLog(device) for device in devices]
        noting = []
        for i, (log, device, program) in enumerate(zip(logs, devices, cut(self.timeline), strict=True)):
            watched = replace(context, mailboxes=log.exchange(context.mailboxes))
            noting.append(log.noting(Lowering(watched, device, i).lower(program)))
        recorded = self._with(noting)

        def begin() -> None:
            for i, log in enumerate(logs):
                executor.call(i, log.begin)

        run = recorded_run(begin, recorded.run, lambda _: [log.notes() for log in logs])
        notes = (NO_CUDA_TRANSFERS,) if self.timeline.transfers and any(d.torch_device.type != "cpu" for d in devices) else ()
        return Recording(*run, self._held(), clock_of(devices[0]).name, notes)

    def _with(self, programs: Sequence[LoweredProgram]) -> "PlacedStep":
        """The same step by programs that are watched."""
        return PlacedStep(self.executor, programs, self.context, self.timeline)

    def _task(self, index: int) -> Callable[[], float]:
        program = self.programs[index]

        def step() -> None:
            slots = program.run()
            if program.loss_slot is not None:
                self._loss = slots[program.loss_slot]

        return partial(busy_us, self.executor.devices[index], self.timeline.graph, step)


class ThreadExecutor:
    """Threads for `devices`. Use it as a context manager: leaving it ends the threads."""

    shared_memory = True
    """All devices are in one process."""

    def __init__(self, devices: Sequence[TorchDevice], timeout_seconds: float = 300.0) -> None:
        keep_freed_memory()
        self.devices = tuple(devices)
        self.timeout_seconds = timeout_seconds
        self.process = os.getpid()
        """The process that the threads are in, as they do not live on in a fork; 0 when they have ended."""
        self._workers = self._started()
        self._broken = False
        self.turn = threading.RLock()
        """Held by whoever has tasks for several devices that wait for each other: among another one's they would wait for good."""

    def _started(self) -> list[Worker]:
        """The thread of each device."""
        return [Worker(device) for device in self.devices]

    def _submitted(self, device: int, task: Callable[[], T]) -> Callable[[], T]:
        """The task, as the device's thread runs it."""
        return task

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, seconds: float = 10.0) -> None:
        """Ends the threads, each within so many seconds; one that hangs in an op is left to end with the process."""
        if self.process == os.getpid():  # one that was forked keeps what its parent's is
            self.process = 0  # calls that come later run as they are
        for worker in self._workers:
            worker.tasks.put(None)
        for worker in self._workers:
            worker.thread.join(timeout=1.0 if self._broken else seconds)

    def load(self, timeline: Timeline, binding: Binding, step: TrainingStep, *, keep_gradients: bool = False) -> PlacedStep:
        """`step` placed as the timeline says, with fresh optimizers; `keep_gradients` keeps each run's gradients for `gather`. It works on
        the step's own parameters and buffers."""
        self._require_enough(timeline)
        mailboxes = Mailboxes(self.timeout_seconds)
        context = StepContext(timeline.graph, binding, step, mailboxes, step.optimizers(), {} if keep_gradients else None)
        return PlacedStep(self, self._lowered(timeline, context), context, timeline)

    def exchange(self, timeline: Timeline) -> Exchange:
        """The exchange that carries tensors between programs that are run together."""
        return Mailboxes(self.timeout_seconds)

    def together(self, timeline: Timeline, exchange: Exchange, programs: Sequence[LoweredProgram]) -> RunTogether:
        """A function that runs these programs, of the first devices, at the same time, each on its slots, and returns for how many
        microseconds each device was busy. After an error the exchange is useless."""

        def run(slots: Sequence[Slots]) -> Sequence[float]:
            own = zip(self.devices, programs, slots, strict=False)
            tasks = [partial(busy_us, device, timeline.graph, partial(program.run, there)) for device, program, there in own]
            return self.run_all(tasks, on_failure=cast(Mailboxes, exchange).abort)

        return run

    def _require_enough(self, timeline: Timeline) -> None:
        if len(timeline.cluster) > len(self.devices):
            raise ExecutionError(f"the plan is for {len(timeline.cluster)} devices, the executor has {len(self.devices)}")

    def _lowered(self, timeline: Timeline, context: StepContext) -> list[LoweredProgram]:
        """The program of each device."""
        return [Lowering(context, self.devices[i], i).lower(program) for i, program in enumerate(cut(timeline))]

    def call(self, device: int, function: Callable[[], T]) -> T:
        """Runs a function in a device's thread and returns its value. Raises ExecutionError where that raises what is none of ours."""
        answer = self._workers[device].submit(self._submitted(device, function))
        if (error := self._error(device, answer)) is not None:
            raise _first_cause(self.devices, [(device, error)])
        return answer.result()

    @contextlib.contextmanager
    def keep_busy(self, companions: int, timeline: Timeline, binding: Binding, step: TrainingStep) -> Iterator[None]:
        """While it is entered, that many of the devices other than 0 run `timeline`, a step on one device, each its own, a replica of
        `step`, over and over."""
        enough = threading.Event()
        loaded = [self.load(timeline, binding, step.replica("cpu")) for _ in range(companions)]
        helpers = range(1, companions + 1)
        tasks = [partial(run_until, placed, self.devices[i], enough.is_set) for i, placed in zip(helpers, loaded, strict=True)]
        with self.turn:
            pending = [self._workers[i].submit(task) for i, task in zip(helpers, tasks, strict=True)]
            try:
                yield
            finally:
                enough.set()
                errors = [self._error(i, answer) for i, answer in zip(helpers, pending, strict=True)]
        for error in filter(None, errors):
            raise error

    def memory_bytes(self) -> list[int]:
        """Bytes that each device may hold."""
        return [memory_bytes(device, len(self.devices)) for device in self.devices]

    def cpu_seconds(self) -> float:
        """CPU time this process has used."""
        return time.process_time()

    def probe_link(self, source: int = 0, target: int = 1, sizes: Sequence[int] = PROBE_BYTES) -> LinkProbe:
        """The link between two devices, measured by sending tensors there and back: half a round trip each.

        The receiver waits asleep, as a device does that has nothing else to run. Raises ExecutionError where a device does not answer.
        """
        return fitted({size: self._round_trips_us(source, target, size) for size in sizes})

    def paces(self, windows: int, window_seconds: float) -> list[Pace]:
        """The pace of each device while all are at work."""
        return self.run_all([partial(play_pace, d, windows, window_seconds) for d in self.devices], on_failure=_nothing)

    def _round_trips_us(self, source: int, target: int, size: int) -> list[float]:
        boxes = Mailboxes(self.timeout_seconds)
        tasks: list[Callable[[], list[float]]] = [list for _ in self.devices]
        for here, there in ((source, target), (target, source)):
            player = Player(self.devices[here], _Boxed(boxes, here, there), leads=here == source)
            tasks[here] = partial(player.round_trips, size, _PROBE_WARMUP, _PROBE_REPEATS)
        return self.run_all(tasks, on_failure=boxes.abort)[source]

    def run_all(self, tasks: Sequence[Callable[[], T]], on_failure: Callable[[], None]) -> list[T]:
        """Runs one task per device at the same time. After a failure `on_failure`, called where it happened, tells the others to stop; the
        first cause is raised.

        Ctrl-C, or another exception in the caller's thread, stops the devices before it goes on to the caller. Of several threads each
        has its turn.
        """
        with self.turn:
            return self._run_together(tasks, on_failure)

    def _run_together(self, tasks: Sequence[Callable[[], T]], on_failure: Callable[[], None]) -> list[T]:
        pending: list[Future[T]] = []
        errors: list[tuple[int, BaseException]] = []
        try:
            for device, (worker, task) in enumerate(zip(self._workers, tasks, strict=False)):
                pending.append(worker.submit(self._submitted(device, partial(_telling, task, on_failure))))
            for index, answer in enumerate(pending):
                try:
                    error = self._error(index, answer)
                except ExecutionError as e:
                    on_failure()
                    error = e
                if error is not None:
                    errors.append((index, error))
        except BaseException:
            on_failure()
            self._await_idle()
            raise
        if errors:
            raise _first_cause(self.devices, errors)
        mind_shortage()
        return [answer.result() for answer in pending]

    def _await_idle(self) -> None:
        """Waits until the devices have ended what they were told to stop: Python may not end while one is in the midst of an op."""
        idle = [worker.submit(_nothing) for worker in self._workers]
        self._broken |= bool(wait(idle, _STOPPING_SECONDS).not_done)

    def _error(self, index: int, answer: Future[Any]) -> BaseException | None:
        """Waits for a device's answer; returns what its task raised."""
        try:
            return answer.exception(self.timeout_seconds)
        except TimeoutError as e:
            raise_if_asked_for(e)
            self._broken = True
            raise ExecutionError(
                f"device {self.devices[index].name} did not answer within {self.timeout_seconds:g} s; "
                "raise --timeout if a step takes that long"
            ) from None


class _Boxed:
    """One end of the mailboxes between two devices; see Channel."""

    def __init__(self, boxes: Mailboxes, here: int, there: int) -> None:
        self._give, self._take = boxes.giver(0, there), boxes.taker(0, here)

    def send(self, tensor: torch.Tensor) -> Wait:
        self._give(tensor)
        return lambda: None

    def receive(self, words: int) -> Wait:
        return self._take


def _telling(task: Callable[[], T], on_failure: Callable[[], None]) -> T:
    """Runs a task; the others hear of its failure at once."""
    try:
        return task()
    except BaseException:
        on_failure()
        raise


def _nothing() -> None:
    """A task that takes no time."""


def busy_us(device: TorchDevice, graph: OpGraph, run: Callable[[], object]) -> float:
    """Microseconds that a device takes to run a program of the graph's. Raises OpFailure where an op of it fails."""
    with explained(device.name, graph):
        start = device.mark()
        run()
        end = device.mark()
        device.synchronize()
    return device.elapsed_us(start, end)


def run_until(placed: PlacedStep, device: TorchDevice, enough: Callable[[], bool]) -> None:
    """Runs a step of one device over and over, until `enough()`. Raises OpFailure where an op of it fails."""
    with explained(device.name, placed.timeline.graph):
        while not enough():
            placed.programs[0].run()


def _first_cause(devices: Sequence[TorchDevice], errors: Sequence[tuple[int, BaseException]]) -> BaseException:
    """The one of several devices' errors that is no mere consequence; an op's own error is wrapped with its device's name."""
    index, error = min(errors, key=lambda item: isinstance(item[1], ExecutionError) and not isinstance(item[1], OpFailure))
    if isinstance(error, (BaechiError, KeyboardInterrupt, SystemExit)):
        return error
    wrapped = ExecutionError(f"device {devices[index].name} failed: {type(error).__name__}: {first_line(error)}")
    wrapped.__cause__ = error
    return wrapped
