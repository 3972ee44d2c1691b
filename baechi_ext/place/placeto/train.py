"""Training: rounds of episodes on a few graphs each, an update after each, and exams that say which policy to keep.

Everything drawn follows from the seed and the number of the update alone; so a training that was interrupted and goes on from its
checkpoint ends with the same policy. Its state is a pair of files like a policy's; its progress is a CSV file, and scalars for TensorBoard.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baechi_ext.errors import MissingBackendError, OptionError, PolicyError
from baechi_ext.ir.files import append_csv, read_text, write_text
from baechi_ext.ir.made_by import MadeBy, signed
from baechi_ext.ir.numbers import as_number
from baechi_ext.place.placeto.checkpoint import read_pair, write_pair
from baechi_ext.place.placeto.learning import ALGORITHMS, LossWeights, Rollout, advantages, loss
from baechi_ext.place.placeto.policy import Policy
from baechi_ext.place.placeto.training_task import STARTS, TrainingTask

if TYPE_CHECKING:
    from torch import Generator, Tensor

State = tuple[dict[str, Any], dict[str, "Tensor"]]
"""The numbers and tensors of a training."""
_DRAWS_OF_AN_UPDATE = 1_000_003
_NUMBERS = ("updates", "exam", "best_exam", "exams_without_success")  # the numbers of a training's state
_COUNTS = ("updates", "exams_without_success")
MAX_NORM = 1.25
"""The largest norm of an update's gradient, as published."""


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """The settings of a training. Pairs are a value at the first update and at the last; what lies between is in proportion."""

    algorithm: str = "ppo"
    """A key of ALGORITHMS."""
    updates: int = 500
    graphs: int = 4
    """For each update, drawn from the training tasks."""
    start: str = "single"
    """One of STARTS."""
    learning_rate: tuple[float, float] = (1e-3, 1e-4)
    entropy: tuple[float, float] = (0.05, 0.005)
    """The weight of the entropy, earned by staying undecided: too little, and it settles for the first thing that helps."""
    discount: float = 1.0
    """The factor on a reward for each step that it comes later."""
    epochs: int = 3
    """PPO: how often each rollout is used."""
    clip: float = 0.2
    exam_every: int = 25
    """Updates between exams."""
    patience: int = 0
    """Exams without a better result after which training stops early; 0: never."""
    seed: int = 0
    workers: int = 1
    """Threads that run episodes. Their number changes no result."""

    def __post_init__(self) -> None:
        for name, value, known in (("algorithm", self.algorithm, ALGORITHMS), ("start", self.start, STARTS)):
            if value not in known:
                raise OptionError(f"unknown {name} {value!r} of a training; choose one of {', '.join(known)}")
        for name in ("updates", "graphs", "epochs", "exam_every", "workers"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} of a training is {getattr(self, name)}; expected at least 1")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The state of a training after an update."""

    updates: int
    episodes: int
    reward: float
    """Mean improvement of an episode of this update, in parts of the step on the fastest device."""
    entropy: float
    """Mean of this update's actions; what the policy has left to learn, at most the logarithm of the number of devices."""
    exam: float
    """The last exam's result: see `examined`."""
    best_exam: float
    best: float
    """Step over lower bound of the best plans that episodes saw, the geometric mean of the graphs that have a valid one."""
    evaluations_per_second: float
    """Simulated plans, by the time of episodes and updates together."""
    seconds: float
    """In which all updates were made."""


class Trainer:
    """A policy in training, and what a checkpoint of it needs."""

    FEWEST_EPISODES = 2
    """At once on a graph: what an episode is worth is found beside others (`advantages`), alone it would teach to stay undecided."""

    def __init__(
        self,
        policy: Policy,
        trainings: Sequence[TrainingTask],
        config: TrainingConfig,
        exams: Sequence[TrainingTask] = (),
        *,
        trained: bool = False,
    ) -> None:
        """Takes a copy of the policy. One that is `trained` has an exam before the first update: the result is none that does worse."""
        import torch

        fewest = min((training.environment.batch for training in trainings), default=self.FEWEST_EPISODES)
        if fewest < self.FEWEST_EPISODES:
            raise OptionError(f"episodes at once on each graph of a training are {fewest}; expected at least {self.FEWEST_EPISODES}")
        self.policy = replace(policy, parameters={k: v.detach().clone().requires_grad_(True) for k, v in policy.parameters.items()})
        self._first = policy
        self._exam_first = trained and len(exams) > 0
        self.trainings = trainings
        self.exams = exams
        self.config = config
        self.updates = 0
        self.optimizer = torch.optim.Adam(self.policy.parameters.values(), lr=config.learning_rate[0])
        self.exam = self.best_exam = math.inf
        self.best = self._copy()
        self.exams_without_success = 0
        self.seconds = 0.0
        """In which updates were made, those of an interrupted training included."""
        self._whole = self._taken()

    @cached_property
    def subject(self) -> dict[str, str]:
        """Digests of all that the training is made from, beside its settings: a key for each of OTHERS."""
        tasks = (*self.trainings, *self.exams)
        return {
            "graphs": _digest([len(self.trainings), *(task.decisions.graph.to_json() for task in tasks)]),
            "clusters": _digest([task.decisions.cluster.to_json() for task in tasks]),
            "episodes": _digest([task.environment.batch for task in tasks]),
            "policy": _digest({name: tensor.tolist() for name, tensor in self._first.parameters.items()}),
        }

    @property
    def done(self) -> bool:
        """True once all updates are made, or exams have not become better for long."""
        tired = 0 < self.config.patience <= self.exams_without_success
        return tired or self.updates >= self.config.updates

    @property
    def result(self) -> Policy:
        """The policy that did best in exams; before the first, and without exams, the one as it is."""
        return self.best if self.best_exam < math.inf else self._copy()

    def run(
        self, watch: Callable[[TrainingProgress], None] | None = None, seconds: float = math.inf, evaluations: float = math.inf
    ) -> Policy:
        """Trains until done, or for this many seconds, and tells `watch` after each update; returns the result.

        It also ends where another update could exceed `evaluations`, the plans simulated in all. Where it is interrupted it is as before
        the update that was under way.
        """
        begun_seconds, before_seconds, before = time.perf_counter(), self.seconds, self._simulated()
        evaluations -= self.config.graphs * max(training.environment.most_simulated for training in self.trainings)
        try:
            with ThreadPoolExecutor(self.config.workers) as pool, single_threaded_torch():
                if self._exam_first and self.updates == 0 and math.isinf(self.best_exam):
                    self._take_exam()
                    self._whole = self._taken()
                while not self.done and time.perf_counter() < begun_seconds + seconds and self._simulated() <= evaluations:
                    reward, entropy = self._update(pool)
                    if self.exams and (self.updates % self.config.exam_every == 0 or self.updates == self.config.updates):
                        self._take_exam()
                    elapsed = time.perf_counter() - begun_seconds
                    self.seconds = before_seconds + elapsed
                    self._whole = self._taken()
                    if watch is not None:
                        watch(self._progress(reward, entropy, (self._simulated() - before) / max(elapsed, 1e-9)))
        except BaseException:  # the threads have ended by now
            self.restore(*self._whole)
            raise
        return self.result

    def _progress(self, reward: float, entropy: float, plans_per_second: float) -> TrainingProgress:
        episodes = sum(training.episodes for training in self.trainings)
        best = _geometric_mean([x.best_ratio for x in self.trainings if x.best_ratio < math.inf])
        return TrainingProgress(self.updates, episodes, reward, entropy, self.exam, self.best_exam, best, plans_per_second, self.seconds)

    def _update(self, pool: ThreadPoolExecutor) -> tuple[float, float]:
        """Episodes and what they teach; returns their mean improvement and the mean entropy."""
        import torch

        config, draw = self.config, self._generator(0)
        share = self.updates / max(1, config.updates - 1)
        for group in self.optimizer.param_groups:
            group["lr"] = _between(config.learning_rate, share)
        chosen = [self.trainings[i] for i in torch.randperm(len(self.trainings), generator=draw)[: config.graphs].tolist()]
        generators = [self._generator(1 + i) for i in range(len(chosen))]
        policy = replace(self.policy, parameters={k: v.detach() for k, v in self.policy.parameters.items()})
        rollouts = list(pool.map(lambda training, generator: training.run(policy, generator, config.start), chosen, generators))
        self._learn(rollouts, LossWeights(_between(config.entropy, share), config.clip), draw)
        self.updates += 1
        rewards = torch.stack([rollout.rewards.sum(dim=0).mean() for rollout in rollouts])
        return float(rewards.mean()), float(-torch.cat([rollout.log_probabilities for rollout in rollouts]).mean())

    def _learn(self, rollouts: Sequence[Rollout], weights: LossWeights, draw: "Generator") -> None:
        import torch

        config = self.config
        trainings = [(rollout, advantages(rollout.rewards, config.discount)) for rollout in rollouts]
        for _ in range(config.epochs if config.algorithm == "ppo" else 1):
            self.optimizer.zero_grad()
            for training in trainings:
                (loss(config.algorithm, self.policy, *training, weights, draw) / len(trainings)).backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters.values(), MAX_NORM)
            self.optimizer.step()

    def _take_exam(self) -> None:
        self.exam = examined(self._copy(), self.exams)
        if self.exam < self.best_exam:
            self.best_exam, self.best, self.exams_without_success = self.exam, self._copy(), 0
        else:
            self.exams_without_success += 1

    def _copy(self) -> Policy:
        return replace(self.policy, parameters={k: v.detach().clone() for k, v in self.policy.parameters.items()})

    def _generator(self, number: int) -> "Generator":
        """Random numbers of this update; `number` tells its uses apart."""
        import torch

        config = self.config
        return torch.Generator().manual_seed((config.seed * _DRAWS_OF_AN_UPDATE + self.updates) * (config.graphs + 1) + number)

    def _simulated(self) -> int:
        return sum(training.environment.simulated for training in self.trainings)

    def state(self) -> State:
        """The arguments of `restore`: numbers and tensors, as they were after the last update, and its exam, that came to its end."""
        return self._whole

    def _taken(self) -> State:
        tensors = {f"policy.{name}": tensor.detach().clone() for name, tensor in self.policy.parameters.items()}
        tensors |= {f"best.{name}": tensor.clone() for name, tensor in self.best.parameters.items()}
        for name, parameter in self.policy.parameters.items():
            tensors |= {f"adam.{name}.{key}": value.clone() for key, value in self.optimizer.state[parameter].items()}
        for i, training in enumerate(self.trainings):
            tensors |= {f"task.{i}.{key}": value for key, value in training.state().items()}
        numbers: dict[str, Any] = {name: None if math.isinf(value := getattr(self, name)) else value for name in _NUMBERS}
        return {**numbers, "seconds": self.seconds, "episodes": [training.episodes for training in self.trainings]}, tensors

    def restore(self, numbers: dict[str, Any], tensors: dict[str, "Tensor"]) -> None:
        """Goes on where `state` was taken; older ones know nothing of seconds, episodes and the plans that these saw. Raises KeyError where
        something is missing, PolicyError where it is of another kind."""
        import torch

        known = {name: math.inf if numbers[name] is None else as_number(numbers[name], name, PolicyError) for name in _NUMBERS}
        for name in _COUNTS:
            known[name] = _whole_number(known[name], numbers[name], name)
        seconds = as_number(numbers.get("seconds", 0.0), "seconds", PolicyError)
        for name, parameter in self.policy.parameters.items():
            for kind in ("policy.{}", "best.{}", *(("adam.{}.exp_avg", "adam.{}.exp_avg_sq") if known["updates"] else ())):
                tensor = tensors[kind.format(name)]
                if tensor.shape != parameter.shape:
                    raise PolicyError(f"{kind.format(name)} is of shape {tuple(tensor.shape)}, expected {tuple(parameter.shape)}")
        self._restore_tasks(numbers.get("episodes"), tensors)
        self.__dict__.update(known, seconds=seconds)
        with torch.no_grad():
            for name, parameter in self.policy.parameters.items():
                parameter.copy_(tensors[f"policy.{name}"])
                self.best.parameters[name].copy_(tensors[f"best.{name}"])
                keys = ("step", "exp_avg", "exp_avg_sq") if self.updates else ()
                self.optimizer.state[parameter] = {key: tensors[f"adam.{name}.{key}"].clone() for key in keys}
        self._whole = self._taken()

    def _restore_tasks(self, episodes: object, tensors: dict[str, "Tensor"]) -> None:
        if episodes is None:
            return
        if not isinstance(episodes, list) or len(episodes) != len(self.trainings):
            raise PolicyError(f"episodes are {episodes!r}; expected a number for each of {len(self.trainings)} graphs")
        for i, (training, count) in enumerate(zip(self.trainings, episodes, strict=True)):
            state = {key: tensors[name] for key in ("plans", "worth") if (name := f"task.{i}.{key}") in tensors}
            training.restore(_whole_number(as_number(count, "episodes", PolicyError), count, "episodes"), state)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _whole_number(number: float, given: object, what: str) -> int:
    if not number.is_integer():
        raise PolicyError(f"{what} is {given!r}; expected a whole number")
    return int(number)


def examined(policy: Policy, exams: Sequence[TrainingTask]) -> float:
    """The score of the policy's likeliest actions: the geometric mean of step over lower bound, excess of memory included."""
    found = []
    for exam in exams:
        exam.run(policy, None)
        found.append(max(float(exam.environment.costs.min()) * exam.environment.scale_us / exam.bound_us, 1e-9))
    return _geometric_mean(found)


def _geometric_mean(values: Sequence[float]) -> float:
    """Infinite where there are none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.inf


@contextmanager
def single_threaded_torch() -> Iterator[None]:
    """Has torch use one thread while it lasts: tensors here are too small for more."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _between(ends: tuple[float, float], share: float) -> float:
    return ends[0] + (ends[1] - ends[0]) * min(1.0, share)


KIND = "placeto training"


def save_training(path: str | Path, trainer: Trainer, made_by: MadeBy | None = None) -> None:
    """Writes NAME.json, signed by `made_by`, and NAME.safetensors; `path` is either, or NAME. Raises FileError where it can't."""
    numbers, tensors = trainer.state()
    value = {"kind": KIND, **_settings(trainer), "learns": trainer.subject, "state": numbers}
    write_pair(path, signed(value, made_by), tensors)


def resume_training(path: str | Path, trainer: Trainer) -> None:
    """Sets a trainer to where the files' one was; it then ends as that one would have.

    Raises FileError where there is no such file, PolicyError where it is damaged or of another training. Older files do not say what it
    learns from.
    """
    value, tensors = read_pair(path, KIND)
    for what, own in _settings(trainer).items():
        given = value.get(what)
        if given != own:
            raise PolicyError(f"{path}: the training is another one: its {what} is {given}, expected {own}; start anew")
    subject = value.get("learns", {})
    for what, digest in trainer.subject.items() if isinstance(subject, dict) else ():
        if subject.get(what, digest) != digest:
            raise PolicyError(f"{path}: the training is another one: {OTHERS[what]}; start anew, in another folder")
    try:
        trainer.restore(value["state"], tensors)
    except (KeyError, TypeError, RuntimeError, PolicyError) as e:
        raise PolicyError(f"{path}: the training can't be resumed ({e!r}); start anew") from e


OTHERS = {
    "graphs": "it learns from other graphs, or has its exams on others (sources, --folder, --most_graphs)",
    "clusters": "it is for other devices or links",
    "episodes": "it runs another number of episodes at once (--episodes)",
    "policy": "it began with another policy (--policy)",
}
"""By what a training is made from, what to say where that is not the same."""


def _settings(trainer: Trainer) -> dict[str, dict[str, object]]:
    """The settings as JSON has them, lists and no tuples, without the number of threads, which changes no result."""
    configs = {"policy": trainer.policy.config.to_json(), "config": trainer.config.to_json()}
    return {
        what: {name: list(value) if isinstance(value, tuple) else value for name, value in config.items() if name != "workers"}
        for what, config in configs.items()
    }


Watch = Callable[[TrainingProgress], None]


def csv_log(path: str | Path, updates: float = math.inf) -> Watch:
    """Appends a line for each update to a CSV file, after a header where the file is new; what is not known is empty. Lines of updates
    beyond those that were made, as a training that was killed leaves them, are removed: it makes them again. Raises FileError."""
    names = [field.name for field in fields(TrainingProgress)]
    append_csv(path, names, [])
    header, *lines = read_text(path, "progress").splitlines(keepends=True) or [""]
    made = [line for line in lines if (number := line.partition(",")[0]).isdecimal() and float(number) <= updates]
    if len(made) < len(lines):
        write_text(path, "".join([header, *made]))
    return lambda progress: append_csv(path, names, [["" if value == math.inf else value for value in asdict(progress).values()]])


def tensorboard_log(folder: str | Path) -> Watch:
    """Writes each update's numbers as scalars for TensorBoard. Raises MissingBackendError where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise MissingBackendError("TensorBoard scalars need tensorboard; pip install 'baechi-ext[plots]', or keep to the CSV file") from e
    writer = SummaryWriter(str(folder))

    def write(progress: TrainingProgress) -> None:
        for name, value in asdict(progress).items():
            if name != "updates":
                writer.add_scalar(f"placeto/{name}", value, progress.updates)
        writer.flush()

    return write
