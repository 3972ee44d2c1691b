"""Training a policy on graphs of families: what `baechi placeto train` does. The same request goes on where its folder left off."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baechi_ext.errors import OptionError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.files import make_folder
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.place.placeto.checkpoint import load_policy, save_policy
from baechi_ext.place.placeto.decisions import Decisions
from baechi_ext.place.placeto.environment import Rules
from baechi_ext.place.placeto.policy import Policy, PolicyConfig
from baechi_ext.place.placeto.train import (
    Trainer,
    TrainingConfig,
    TrainingProgress,
    Watch,
    csv_log,
    resume_training,
    save_training,
    tensorboard_log,
)
from baechi_ext.place.placeto.training_task import TrainingTask
from baechi_runtime.placeto.graphs import Source
from baechi_runtime.report.findings import Findings
from baechi_runtime.report.printed import PolicyTrained
from baechi_runtime.report.progress import progress

EXAM_SHARE = 4
"""Every fourth graph is for exams: which policy is kept is not decided on what it learned from."""


@dataclass(frozen=True, slots=True)
class TrainingRequest:
    """A policy to be trained, the graphs to train it on, and the folder it goes to."""

    sources: Sequence[Source]
    cluster: Cluster
    out: Path
    config: TrainingConfig
    policy: str | None = None
    """A file to begin with; None: a fresh policy made of `network`."""
    network: PolicyConfig = PolicyConfig()  # noqa: RUF009 - frozen
    episodes: int = 8
    time_limit_seconds: float | None = None
    tensorboard: bool = False
    command: tuple[str, ...] = ()
    """The command line, word by word."""

    def __post_init__(self) -> None:
        own = (self.out / "policy").resolve()
        if self.policy is not None and Path(self.policy).resolve() in (own, own.with_suffix(".json"), own.with_suffix(".safetensors")):
            raise OptionError(
                f"--policy={self.policy} is the file that the training writes to --out: it would be lost, and the training could not be "
                "resumed; give another --out, or leave out --policy to go on with the training there"
            )


@dataclass(frozen=True, slots=True)
class TrainingReport(Findings):
    """The state of a training when its command ends."""

    file: str
    updates: int
    done: bool
    exam: float
    """The kept policy's result in exams: step over lower bound of its likeliest actions, the geometric mean of the exam graphs."""
    graphs: int
    exam_graphs: int

    def report(self) -> PolicyTrained:
        return PolicyTrained(**asdict(self) | {"exam": None if math.isinf(self.exam) else self.exam})

    def lines(self) -> list[str]:
        exam = "" if math.isinf(self.exam) else f"; step over lower bound in exams on {self.exam_graphs} others: {self.exam:.4f}"
        state = "done" if self.done else "not done; the same command goes on"
        return [f"policy    {self.file}", f"training  {self.updates} updates on {self.graphs} graphs{exam} ({state})"]


def train(request: TrainingRequest) -> TrainingReport:
    """Trains until done or until the time limit, and writes the best policy to the folder `out`, with the training and its CSV file.

    Raises OptionError where no graph leaves anything to decide, FileError or PolicyError for what can't be read, written or gone on
    with, MissingBackendError without torch, safetensors, or TensorBoard where it is asked for. Where the user interrupts it, what
    is trained by then is written, too.
    """
    make_folder(request.out)
    policy = Policy.fresh(request.network, request.config.seed) if request.policy is None else load_policy(request.policy)
    trainings, exams = _trainings(request, policy.config.visits)
    trainer = Trainer(policy, trainings, request.config, exams, trained=request.policy is not None)
    about = {"sources": [source.name for source in request.sources], "cluster": request.cluster.to_json()}
    seconds = math.inf if request.time_limit_seconds is None else request.time_limit_seconds
    scalars = [tensorboard_log(request.out / "tensorboard")] if request.tensorboard else []
    train_in(request.out, trainer, about, seconds, MadeBy(request.command), scalars)
    return TrainingReport(str(request.out / "policy.json"), trainer.updates, trainer.done, trainer.best_exam, len(trainings), len(exams))


def train_in(
    folder: Path,
    trainer: Trainer,
    about: Mapping[str, Any],
    seconds: float,
    made_by: MadeBy | None = None,
    more_logs: Iterable[Watch] = (),
) -> dict[str, Any]:
    """Goes on with the training that the folder holds, if there is one, for this many seconds at most; what came of it is written there
    however it ends, its progress to progress.csv and `more_logs`. Returns what the policy's file says of its training: `about`, beside the
    settings and how far it came.

    Raises FileError or PolicyError for what can't be written or gone on with.
    """
    state, exam_every = folder / "training", trainer.config.exam_every
    if state.with_suffix(".json").exists():
        resume_training(state, trainer)
    logs = [csv_log(folder / "progress.csv", trainer.updates), *more_logs]
    with progress(f"training on {len(trainer.trainings)} graphs") as show:

        def watch(now: TrainingProgress) -> None:
            for log in logs:
                log(now)
            show(news(now))
            if now.updates % exam_every == 0:
                save_training(state, trainer, made_by)

        try:
            trainer.run(watch, seconds)
        finally:
            save_training(state, trainer, made_by)
            exam = None if math.isinf(trainer.best_exam) else trainer.best_exam
            said = {**trainer.config.to_json(), **about, "updates_made": trainer.updates, "exam": exam}
            save_policy(folder / "policy", trainer.result, said, made_by)
    return said


def news(now: TrainingProgress) -> str:
    """A line on how a training stands."""
    best = "" if math.isinf(now.best) else f", best steps {now.best:.3f} x bound"
    exam = "" if math.isinf(now.exam) else f", exam {now.exam:.3f} (best {now.best_exam:.3f})"
    return f"update {now.updates}, episode {now.episodes}, reward {now.reward:.3f}{best}{exam}, {now.evaluations_per_second:.0f} plans/s"


def _trainings(request: TrainingRequest, visits: int) -> tuple[list[TrainingTask], list[TrainingTask]]:
    """Tasks to learn from, and tasks for exams: none where there are too few graphs."""
    with progress("loading graphs"):
        graphs = [graph for source in request.sources for graph in source.graphs("train").values()]
        rules = Rules(visits=visits)

        def trainings(some: Sequence[OpGraph], batch: int) -> list[TrainingTask]:
            decided = (Decisions.of(graph, request.cluster) for graph in some)
            return [TrainingTask(decisions, batch, rules) for decisions in decided if len(decisions) > 0]

        exams = [graph for i, graph in enumerate(graphs) if i % EXAM_SHARE == EXAM_SHARE - 1]
        taught = [graph for i, graph in enumerate(graphs) if i % EXAM_SHARE != EXAM_SHARE - 1]
        found = trainings(taught, request.episodes), trainings(exams, 1)
    if not found[0]:
        raise OptionError(f"none of the {len(graphs)} graphs has an op; give sources with graphs to learn from")
    return found
