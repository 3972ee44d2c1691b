"""Trains the policy that `placeto` ships, on generated graphs and on the families' train splits, and says how it does on others of them.

    python -m benchmarks.placeto_policy --out=FOLDER                       trains, or goes on with what FOLDER holds
    python -m benchmarks.placeto_policy --out=FOLDER --updates=2000 --ship

FOLDER gets the training to resume (training.json, .safetensors), progress.csv and the best policy (policy.json, .safetensors). Of the
train splits every fourth graph is for exams alone; the test splits stay unseen.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from baechi_ext.datasets import FAMILIES, INSTALLED, load
from baechi_ext.ir import Cluster, Device, OpGraph
from baechi_ext.ir.files import make_folder
from baechi_ext.place.placeto.checkpoint import SHIPPED, save_policy
from baechi_ext.place.placeto.decisions import Decisions
from baechi_ext.place.placeto.environment import Rules
from baechi_ext.place.placeto.policy import Policy, PolicyConfig
from baechi_ext.place.placeto.train import Trainer, TrainingConfig
from baechi_ext.place.placeto.training_task import TrainingTask
from baechi_runtime.placeto.training import train_in
from benchmarks.families import link_of_ratio, tightened
from benchmarks.runner import parsed
from benchmarks.shapes import FAMILIES as SHAPES_OF

SHAPES = ("layered", "fork_join", "series_parallel", "random", "training")
"""All but the three that are held out for the comparison of methods."""
TRAININGS, EXAMS = 96, 24
"""Numbers of generated graphs."""
FEWEST_OPS, MOST_OPS = 20, 120
CLUSTERS = 2
"""Clusters on which each graph of a family is placed."""
_EXAM_SEEDS, _FAMILY_SEEDS = 100_000, 200_000


def problem(seed: int) -> tuple[OpGraph, Cluster]:
    """A graph of 20 to 120 ops and its cluster; the seed says which."""
    draw = np.random.default_rng(seed)
    graph = SHAPES_OF[str(draw.choice(SHAPES))](int(draw.integers(FEWEST_OPS, MOST_OPS + 1)), draw)
    return graph, drawn_cluster(graph, draw)


def drawn_cluster(graph: OpGraph, draw: np.random.Generator) -> Cluster:
    """2 to 8 devices: transfers take 0.1 to 10 times as long as ops, in a quarter of the clusters devices are of unequal speed, in a
    quarter memory is tight."""
    count = int(draw.choice([2, 2, 3, 4, 4, 6, 8]))
    speeds = 2.0 ** draw.integers(-1, 2, size=count) if draw.random() < 0.25 else np.ones(count)
    devices = tuple(Device(f"device:{i}", None, float(speed)) for i, speed in enumerate(speeds))
    cluster = Cluster(devices, link_of_ratio(graph, 10 ** draw.uniform(-1, 1)))
    return tightened(graph, cluster) if draw.random() < 0.25 else cluster


def trainings(count: int, batch: int, first_seed: int, rules: Rules) -> list[TrainingTask]:
    """The first `count` problems from a seed on that leave something to decide."""
    found: list[TrainingTask] = []
    seed = first_seed
    while len(found) < count:
        decisions = Decisions.of(*problem(seed))
        if len(decisions) >= 10:
            found.append(TrainingTask(decisions, batch, rules))
        seed += 1
    return found


def family_trainings(folder: Path, episodes: int, rules: Rules) -> tuple[list[TrainingTask], list[TrainingTask]]:
    """Tasks of the train splits, and exams."""
    taught, exams = [], []
    for family in FAMILIES:
        for i, graph in enumerate(load(family, "train", folder)):
            draw = np.random.default_rng(_FAMILY_SEEDS + i)
            if i % 4 == 3:
                exams.append(TrainingTask.of(graph, drawn_cluster(graph, draw), 1, rules))
            else:
                taught += [TrainingTask.of(graph, drawn_cluster(graph, draw), episodes, rules) for _ in range(CLUSTERS)]
    return taught, exams


FLAGS = {
    "--out": {"type": Path, "required": True},
    "--folder": {"type": Path, "default": INSTALLED, "help": "where the families are"},
    "--updates": 1000,
    "--episodes": {"type": int, "default": 8, "help": "at once on each graph"},
    "--visits": {"type": int, "default": 1, "help": "of each decision in an episode"},
    **{
        f"--{name}": getattr(TrainingConfig(), name)
        for name in ("discount", "start", "learning_rate", "entropy", "graphs", "seed", "workers")
    },
    "--ship": {"action": "store_true", "help": "write the best policy to where the package has it, too"},
}


def main(argv: Sequence[str] | None = None) -> None:
    args = parsed(__doc__, FLAGS, argv)
    args.entropy = tuple(args.entropy)
    config = TrainingConfig(**{f.name: getattr(args, f.name) for f in fields(TrainingConfig) if hasattr(args, f.name)})
    policy = Policy.fresh(PolicyConfig(visits=args.visits), args.seed)
    rules = Rules(visits=args.visits)
    taught, exams = family_trainings(args.folder, args.episodes, rules)
    taught += trainings(TRAININGS, args.episodes, 0, rules)
    exams += trainings(EXAMS, 1, _EXAM_SEEDS, rules)
    trainer = Trainer(policy, taught, config, exams)
    make_folder(args.out)
    about = {"training_tasks": len(taught), "exams": len(exams), "command": command(sys.argv[1:] if argv is None else argv)}
    training = train_in(args.out, trainer, about, math.inf)
    if args.ship:
        SHIPPED.parent.mkdir(exist_ok=True)
        save_policy(SHIPPED, trainer.result, training)


def command(argv: Sequence[str]) -> str:
    """The command that trains such a policy, whatever the folder, in however many parts."""
    said = [word for word in argv if not word.startswith(("--out", "--ship", "--workers"))]
    return " ".join(["python -m benchmarks.placeto_policy --out=FOLDER", *said, "--ship"])


if __name__ == "__main__":
    main()
