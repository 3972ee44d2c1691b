"""Threads, loaders, and coroutines around a training loop."""

import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.hostile.suite import Net, Wrap, batches, case, seeded, sgd, state, train, updates


def three_threads_call_one_model(model: Net) -> Any:
    found = train(model, steps=2)
    inputs = [x for x, _ in batches(9)]
    with ThreadPoolExecutor(3) as pool:
        outs = list(pool.map(lambda x: model(x).detach(), inputs))
    return found, outs


def first_calls_come_from_three_threads(model: Net) -> Any:
    inputs = [x for x, _ in batches(6)]
    barrier = threading.Barrier(3)

    def call(i: int) -> Tensor:
        barrier.wait()
        return torch.cat([model(x).detach() for x in inputs[i::3]])

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(call, range(3)))


def threads_train_models_of_their_own(wrap: Wrap) -> Any:
    models = [wrap(seeded()) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(train, models))


def whole_training_is_in_a_thread(model: Net) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(train, model).result(), train(model, steps=2)


def batches_come_from_a_thread(wrap: Wrap) -> Any:
    model, waiting = wrap(seeded()), queue.Queue(2)

    def produce() -> None:
        for batch in batches():
            waiting.put(batch)
        waiting.put(None)

    threading.Thread(target=produce).start()
    optimizer = sgd(model)
    while (batch := waiting.get()) is not None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
    return state(model)


def backward_runs_in_another_thread(model: Net) -> Any:
    with ThreadPoolExecutor(1) as pool:
        for x, y in updates(model):
            pool.submit(F.cross_entropy(model(x), y).backward).result()
    return state(model)


@case
class ForwardStartsAThread(Net):
    def hidden(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(torch.tanh(self.first(x))))
        thread.start()
        thread.join()
        return torch.relu(self.second(found[0]))


@case(lambda given, model: (train(model), given.calls, given.lock.locked()))
class LockInForward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.calls += 1
            return super().forward(x) / self.calls


def coroutine_calls_the_model(model: Net) -> Any:
    async def one(x: Tensor, y: Tensor) -> Tensor:
        await asyncio.sleep(0)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    async def everything() -> list[Tensor]:
        return [await one(x, y) for x, y in batches()]

    return asyncio.run(everything()), state(model)


def evaluation_thread_beside_training(model: Net, seen: list) -> Any:
    def evaluate(step: int) -> None:
        def call() -> None:
            with torch.no_grad():
                seen.append((torch.is_grad_enabled(), model(torch.full((2, 16), 0.1 * step))))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    return train(model, evaluate), seen


def number_of_threads_changes(model: Net) -> Any:
    before = torch.get_num_threads()
    try:
        found = train(model, lambda step: torch.set_num_threads(1 + step % 2))
        return found, torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
