"""The flags of `baechi train`, and the one checked request they become: a TrainRequest, or for a user's own script a ScriptRequest."""

import argparse
from collections.abc import Collection
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from baechi_ext.errors import OptionError
from baechi_ext.ir import Cluster
from baechi_runtime.cli.flags import baechi as baechi_flags
from baechi_runtime.cli.flags import config as config_flags
from baechi_runtime.cli.flags import kinds
from baechi_runtime.cli.flags.kinds import Flag, Kind
from baechi_runtime.cli.flags.placing import OF_PLANS, PUBLISHED_AND_HERE, add_placing_flags, hardware_flags, is_elsewhere, plan_request
from baechi_runtime.drivers.train_request import HardwareRequest, RunOptions, ScriptRequest, TrainRequest
from baechi_runtime.host.as_main import require_script
from baechi_runtime.host.cache_folder import cache_folder
from baechi_runtime.host.variables import number_of
from baechi_runtime.models.options.gnmt_v2 import ENCODER_TYPES, UNIT_TYPES
from baechi_runtime.models.registry import FRAMEWORKS, MODELS, ModelOptions, chosen_options
from baechi_runtime.tensorflow.coarse import COARSE, begins_coarse

TORCH, TENSORFLOW = "torch", "tensorflow"
OPTIMIZERS = ("sgd", "momentum", "rmsprop", "adagrad", "adadelta", "adam", "adamw")
DEFAULT_DEVICES = 2
CHECKPOINT_EVERY = 100
AUTO, PER_PART = "auto", "per_part"
OF_MODELS = {"model_name", "optimizer", "learning_rate", *(f.name for f in fields(ModelOptions) if f.name not in ("num_devices", "seed"))}
"""The flags that say what a built-in model's step is; --seed is of methods, too."""
OF_RUNS = {"num_steps", "train_steps", "checkpoint", "checkpoint_every", "resume"}
"""Those that say how long `baechi train` runs it."""
_UNTIMED = ("train_steps", "costgen", "hardware")
"""Flags with which no step is timed."""
_OF_ONE_STEP = ("cost_path", "initial_plan", "device_map", "expert_file", "pin", "grouper", "placer_type")
"""Flags whose files and names are of the step with its whole batch."""


def _optimizer(text: str) -> str:
    if text == "ftrl":
        raise argparse.ArgumentTypeError("ftrl is TensorFlow's alone; choose adagrad, which scales each weight's steps in the same way")
    return kinds.OneOf(tuple(OPTIMIZERS))(text)


def _hosts(text: str) -> tuple[str, ...]:
    """Flag type: host:port of every device."""
    hosts = tuple(part.strip() for part in text.split(","))
    for host in hosts:
        name, _, port = host.rpartition(":")
        if not name or not port.isdigit() or not 0 < int(port) < 65536:
            raise argparse.ArgumentTypeError(f"{host!r} is not host:port; give one for each device, as alpha:2222,beta:2222")
        if hosts.count(host) > 1:
            raise argparse.ArgumentTypeError(f"{host!r} appears twice; give every device its own")
    return hosts


def _strategies(text: str) -> tuple[str, ...]:
    """Flag type: names with commas between them, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} names no strategy; give pase, data_parallel, expert, ddp, fsdp2 or a shard plan file")
    return names


def _speeds(text: str) -> tuple[float, ...]:
    """Flag type: speeds with commas between them."""
    return tuple(kinds.positive(part) for part in text.split(","))


def _mesh(text: str) -> tuple[int, ...]:
    """Flag type: 2x2."""
    try:
        shape = tuple(int(part) for part in text.split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh; give its sizes as 2x2")
    return shape


def _microbatches(text: str) -> int | tuple[int, ...] | str:
    """Flag type: auto, a number of parts, or their sizes."""
    if text == AUTO:
        return AUTO
    try:
        sizes = tuple(kinds.at_least_one(part) for part in text.split(","))
    except argparse.ArgumentTypeError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not {AUTO}, a number of parts, such as 4, or the sizes of all, such as 3,1") from e
    return sizes[0] if len(sizes) == 1 else sizes


def _takers(what: str, name: str) -> str:
    return f"{what}for {', '.join(model for model, entry in MODELS.items() if name in entry.takes)}"


FRAMEWORK: dict[str, Flag] = {"framework": (kinds.choice(FRAMEWORKS), f"{', '.join(FRAMEWORKS)} (default %(default)s)", TORCH)}
WORKERS = kinds.choice(("thread", "process"), "KIND")
GPUS: dict[str, Flag] = {
    "split_gpu": (kinds.DEVICES, "run the first GPU as N devices, to try a plan for N GPUs on one"),
    "use_free_memory": (
        kinds.SWITCH,
        "plan with the memory free on the GPUs now, which varies with what else runs; needs nvidia-ml-py",
    ),
}
_SCRIPT: dict[str, Flag] = {
    "verify_steps": (
        kinds.WHOLE,
        "first calls that also run unplaced, to compare; with PyTorch ever fewer of the later ones, too (default %(default)s; 0: none)",
        2,
    ),
    "strict": (kinds.SWITCH, "stop where a script's model can't be placed, or differs; otherwise it runs as it is, and says once why"),
    "keep_placed": (kinds.SWITCH, "stay placed even if slower; otherwise placed and plain steps take turns first, and the faster is kept"),
    "no_cache": (kinds.SWITCH, "measure and search anew, whatever earlier runs of a script have kept, and keep nothing"),
    "cache_dir": (
        kinds.DIR,
        "where a script's plans and costs are kept for its next run ($BAECHI_CACHE, else baechi in $XDG_CACHE_HOME or ~/.cache)",
    ),
    "fallback": (kinds.SWITCH, argparse.SUPPRESS),  # the default by now
}
_BUILT_IN = "\nwith --framework=tensorflow: ".join(
    "; ".join(f"{name}: {model.help}" for name, model in models.items()) for models in FRAMEWORKS.values()
)
_STEP: dict[str, Flag] = {
    **FRAMEWORK,
    "model_name": (kinds.choice(MODELS), f"{_BUILT_IN}\n (default %(default)s)", "inception_v3"),
    "optimizer": (Kind(_optimizer, "NAME"), f"{', '.join(OPTIMIZERS)} (default %(default)s)", "sgd"),
    "learning_rate": (kinds.FACTOR, "the optimizer's (default %(default)s)", 0.01),
    "colocate_grads_with_ops": (kinds.SWITCH, "run each backward op where its forward op runs"),
    "relaxed_random": (kinds.SWITCH, "let dropout run anywhere, in any order; parity with the unplaced step is lost"),
}
_MODEL: dict[str, tuple[Kind | None, str]] = {
    "batch_size": (kinds.COUNT, "examples in a step; "),
    "image_size": (Kind(kinds.at_least_one, "PIXELS"), "height and width; "),
    "vocab_size": (kinds.COUNT, "vocabulary size; "),
    "max_seq_length": (kinds.COUNT, "words per sentence; "),
    "rnn_units": (kinds.COUNT, "units per layer; "),
    "num_layers": (kinds.COUNT, "layers of the network, or of encoder and decoder each; "),
    "rnn_chunk": (kinds.COUNT, "time steps per op; "),
    "nasnet_cells": (kinds.COUNT, "normal cells between reductions; "),
    "nasnet_filters": (kinds.COUNT, "filters of the first cells; "),
    "resnet_filters": (kinds.COUNT, "filters of the first stage; "),
    "d_model": (kinds.COUNT, "width of the residual stream; "),
    "d_ff": (kinds.COUNT, "width inside feed-forward layers; "),
    "num_heads": (kinds.COUNT, "heads per attention; "),
    "rnn_unit_type": (kinds.choice(UNIT_TYPES), f"{', '.join(UNIT_TYPES)}; "),
    "encoder_type": (kinds.choice(ENCODER_TYPES), f"{', '.join(ENCODER_TYPES)}; "),
    "dropout": (kinds.SHARE, "dropout rate; "),
    "residual": (kinds.SWITCH, "add a layer's input to its output; "),
    "large": (kinds.SWITCH, "the network for ImageNet; "),
}
"""The flag of each field of ModelOptions, with the beginning of its help."""
_DEVICES: dict[str, Flag] = {
    "num_devices": (kinds.DEVICES, f"CPU workers (default {DEFAULT_DEVICES})"),
    "num_gpus": (kinds.DEVICES, "CUDA devices; ignored if --num_devices is given"),
    **GPUS,
    "cuda_graphs": (
        kinds.SWITCH,
        "launch a step (of a script: a pass of a call) as one CUDA graph of all devices, where it can be one (default with --num_gpus "
        "and --split_gpu, not with --workers=process)",
        None,
    ),
    "no_cuda_graphs": (kinds.SWITCH, "give CUDA devices of one process their ops one by one (elsewhere it has no effect)"),
    "compile": (kinds.SWITCH, "also measure the unplaced step under torch.compile on one device, and compare the plan with it"),
    "workers": (
        WORKERS,
        "thread: all devices in this process; process: a process per device, with memory of its own (default thread; process for "
        "TensorFlow's CPU workers and --sharding)",
    ),
    "cluster_hosts": (
        Kind(_hosts, "HOST:PORT,..."),
        "TensorFlow: a device on each of these; the same command runs on every host, with its --task_index",
    ),
    "task_index": (kinds.WHOLE, "which of --cluster_hosts this is; 0, the default, places and measures, the others serve"),
    "cluster": (kinds.FILE, "a cluster file instead of the machine's own memory and a probed link"),
    "device_memory": (kinds.SIZE, "memory of each device: 16GiB, 800MB, or bytes"),
    "device_speeds": (
        Kind(_speeds, "F,F"),
        "the speed of each device, or one for all: an op takes its cost divided by that (default: built-in models of PyTorch compare the "
        "devices side by side, others take them to be equal)",
    ),
    "memory_fraction": (kinds.FRACTION, "the fraction of each device's memory that a plan may use (default 1)", 1.0),
    "comm_cost_coeffs": (kinds.LINK, "sending n bytes takes A*n + B microseconds; without it the link is probed"),
}
_SHARDING: dict[str, Flag] = {
    "sharding": (
        Kind(_strategies, "NAMES"),
        "split every layer over worker processes instead of placing ops: pase (the cheapest way found), data_parallel, expert, ddp or "
        "fsdp2 (torch's own data parallelism), or a shard plan file; several with commas between them are compared",
        (),
    ),
    "mesh": (Kind(_mesh, "NxN"), "the mesh of these processes (default: their number's prime factors)"),
}
_COSTS: dict[str, Flag] = {
    "cost_path": (kinds.FILE, "read costs from this file instead of profiling (with --costgen: write them; cost.json)"),
}
_RUN: dict[str, Flag] = {
    "num_steps": (kinds.COUNT, "measured steps of each variant (default %(default)s)", 15),
    "timeout": (kinds.TIMEOUT, "for a device to answer (default %(default)g)", 300.0),
    "out": (
        kinds.DIR,
        "keep graph, profile, plan, a measured step (none where it is a CUDA graph; --no_cuda_graphs records one) and the report there as "
        "JSON, and the flags as config.toml",
    ),
    "json": (kinds.SWITCH, "print the report as JSON"),
}
_TENSORBOARD = (
    "write times of steps, speed-up and memory there as scalars (needs tensorboard); a script's own run of Weights & Biases or MLflow "
    "gets them in any case, and the page"
)
_BATCH: dict[str, Flag] = {
    "microbatches": (
        Kind(_microbatches, "N"),
        "the parts that a batch is split into, each with ops of its own that are placed: auto (one for each device, where that is "
        "faster), a number, or sizes, as 3,1 (default: auto where --placement_method=auto may choose freely, else 1, and 1 for "
        "scripts); a script's batch stays whole where its examples are mixed",
    ),
    "batch_norm": (
        kinds.choice(("whole", PER_PART)),
        "whole: a batch that BatchNorm normalises over is not split; per_part: each part may be normalised by itself, as "
        "DistributedDataParallel does it (default %(default)s)",
        "whole",
    ),
}
_TRAINING: dict[str, Flag] = {
    "train_steps": (kinds.COUNT, "train until step N, and print the losses"),
    "checkpoint": (kinds.DIR, "keep the last two checkpoints there"),
    "checkpoint_every": (
        Kind(kinds.at_least_one, "K"),
        f"a checkpoint every K steps, and after the last (default {CHECKPOINT_EVERY})",
    ),
    "resume": (kinds.SWITCH, "go on from the last checkpoint, or start where there is none"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of the sub-command."""
    add_script(parser, "a training script, run unmodified with its model placed, instead of a built-in model")
    kinds.add_group(parser, "script", _SCRIPT)
    kinds.add(add_shared_flags(parser), _SHARDING)
    kinds.add_group(parser, "hardware", hardware_flags("--cost_path", PUBLISHED_AND_HERE))
    add_batch_flags(parser)
    parser.add_argument_group("logging").add_argument("--tensorboard", dest="logs", type=kinds.scalars, metavar="DIR", help=_TENSORBOARD)
    kinds.add_group(parser, "costs", {"costgen": (kinds.SWITCH, "only profile, and write the costs to --cost_path")})
    kinds.add(parser.add_argument_group("training on", "With --train_steps the placed model is trained instead of timed."), _TRAINING)
    baechi_flags.add_flags(parser)


def add_shared_flags(parser: argparse.ArgumentParser, *, method: bool = True) -> argparse._ArgumentGroup:
    """Those that `compare` takes, too, except --placement_method where that is asked for; and the group of devices, for more."""
    parser.set_defaults(script=None, script_args=None, costgen=False, sharding=(), mesh=None, log_device_placement=False)
    parser.set_defaults(train_steps=None, checkpoint=None, checkpoint_every=None, resume=False)
    kinds.add_group(parser, "training step", _STEP)
    add_model_flags(parser)
    add_placing_flags(parser, method=method)
    group = kinds.add_group(parser, "devices", _DEVICES)
    kinds.add_group(parser, "costs", _COSTS)
    kinds.add_group(parser, "run", _RUN)
    without = {flag: {"num_steps"} for flag in _UNTIMED}
    config_flags.add_flag(parser, {"cluster", "comm_cost_coeffs"}, {"cluster", "device_speeds"}, without=without)
    return group


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Those of the batch and its parts."""
    kinds.add_group(parser, "batch", _BATCH)


def add_script(parser: argparse.ArgumentParser, what: str) -> None:
    """The script alone."""
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help=f"{what}; its arguments follow --")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The fields of ModelOptions; a flag that is not given leaves the model its own default."""
    group = parser.add_argument_group("model", "A flag that is not given leaves the model's own default.")
    kinds.add(group, {name: (kind, _takers(what, name), None) for name, (kind, what) in _MODEL.items()})


def request_of(args: argparse.Namespace) -> TrainRequest | ScriptRequest | HardwareRequest:
    """The request of `baechi train`. Raises OptionError where flags contradict each other, FileError or ClusterError for a bad file."""
    require_named_script(args, "train")
    if args.script is None:
        require_none_of(args, _SCRIPT, "is for scripts; drop it, or name one")
        for flag in filter(partial(getattr, args), _UNTIMED):
            require_none_of(args, {"num_steps"}, f"is how many steps are timed, and --{flag} times none; drop one of them")
    if is_elsewhere(args):
        if args.script is not None:
            raise OptionError(f"--hardware plans a built-in model; for {args.script} give baechi place its graph, which --out keeps")
        if args.logs is not None:
            raise OptionError(f"--hardware={args.hardware} plans a built-in model of PyTorch's and runs nothing; drop --tensorboard")
        return HardwareRequest(train_request(args), args.hardware, args.measured_on)
    if args.costgen and args.logs is not None:
        raise OptionError("--costgen runs no step, and --tensorboard gets the times of steps; give one of them")
    if args.script is None:
        return train_request(args)
    request = script_request(args)
    require_script(args.script)
    return request


def train_request(args: argparse.Namespace) -> TrainRequest:
    """The request the flags ask for. Raises OptionError where they contradict each other or the model, FileError or ClusterError for a bad
    file."""
    cluster = None if args.cluster is None else Cluster.load(args.cluster)
    devices = devices_of(args, len(args.cluster_hosts or cluster or ()))
    if args.cuda_graphs and args.no_cuda_graphs:
        raise OptionError("--cuda_graphs and --no_cuda_graphs cannot be used together; give one of them")
    if "task_index" in args.given and not args.cluster_hosts:
        raise OptionError("--task_index is a place in --cluster_hosts; give that as well")
    if args.framework == TENSORFLOW and begins_coarse(args.placement_method) and args.grouper is None and args.placer_type is None:
        args.grouper, args.placer_type = COARSE
    values = kinds.named(TrainRequest, args) | devices | {
        "model": args.model_name,
        "plan": plan_request(args),
        "model_options": model_options(args, devices["num_devices"]),
        "microbatches": _parts(args),
        "batch_norm_per_part": args.batch_norm == PER_PART,
        "cuda_graphs": False if args.no_cuda_graphs else args.cuda_graphs,
        "cluster": cluster,
        "memory_fraction": args.memory_fraction * args.placer_memory_fraction,
        "link": args.comm_cost_coeffs,
        "run": _run_options(args),
    }
    request = TrainRequest(**values)
    if args.sharding:
        require_none_of(args, {*OF_PLANS, "use_free_memory"}, "is for a plan that places ops, and --sharding makes none; drop it")
    if args.script is None:
        chosen_options(request.model, request.model_options, request.framework)
    return request


def model_options(args: argparse.Namespace, num_devices: int) -> ModelOptions:
    """The model options that the flags of `add_model_flags` give."""
    return ModelOptions(**kinds.named(ModelOptions, args) | {"num_devices": num_devices})


def devices_of(args: argparse.Namespace, count: int = 0) -> dict[str, Any]:
    """The fields of a DevicesRequest that flags give in other words; of `count` devices where no flag gives their number, if that is not 0.
    Raises OptionError where several give it."""
    for other in ("num_devices", "num_gpus"):
        if None not in (args.split_gpu, getattr(args, other)):
            raise OptionError(f"--split_gpu and --{other} cannot be used together; give one of them")
    cuda = args.split_gpu is not None or (args.num_devices is None and args.num_gpus is not None)
    processes = getattr(args, "sharding", ()) or (args.framework == TENSORFLOW and not cuda)  # there one process drives all GPUs
    return {
        "num_devices": args.split_gpu or args.num_devices or args.num_gpus or count or DEFAULT_DEVICES,
        "cuda": cuda,
        "split_gpu": args.split_gpu is not None,
        "workers": args.workers or ("process" if processes else "thread"),
        "timeout_seconds": args.timeout,
    }


def _parts(args: argparse.Namespace) -> tuple[int, ...] | int | None:
    """TrainRequest.microbatches. Raises OptionError for parts left to the search with files of another split."""
    given: int | tuple[int, ...] | str | None = args.microbatches
    splits = not args.sharding and args.framework == TORCH
    others = [name for name in _OF_ONE_STEP if getattr(args, name)]
    if given == AUTO and splits and others:
        raise OptionError(
            f"--microbatches=auto and --{others[0]} cannot be used together: the latter is about one way to split a batch; drop one"
        )
    if given is None:
        return None if splits and args.script is None and args.placement_method == AUTO and not others else 1
    return None if isinstance(given, str) else given


def _run_options(args: argparse.Namespace) -> RunOptions | None:
    """None without --train_steps. Raises OptionError where the flags contradict each other."""
    needs = {"--checkpoint": args.checkpoint is not None, "--checkpoint_every": args.checkpoint_every is not None, "--resume": args.resume}
    for flag, given in needs.items():
        if given and args.train_steps is None:
            raise OptionError(f"{flag} is for a training; give --train_steps=N as well")
        if given and args.checkpoint is None:
            raise OptionError(f"{flag} needs a folder; give --checkpoint=DIR as well")
    if args.train_steps is None:
        return None
    every, keeps_parts = args.checkpoint_every or CHECKPOINT_EVERY, args.microbatches in (None, AUTO)
    return RunOptions(args.train_steps, args.checkpoint, every, args.resume, args.command, keeps_parts)


def script_request(args: argparse.Namespace) -> ScriptRequest:
    """The request the flags ask for. Raises OptionError where they contradict each other."""
    require_none_of(args, {*OF_MODELS, *OF_RUNS, "compile"})
    request = train_request(args)
    require_one_start(request.workers)
    if args.strict and args.fallback:
        raise OptionError("--strict and --fallback say the opposite of each other; give one of them")
    if args.no_cache and args.cache_dir is not None:
        raise OptionError("--no_cache and --cache_dir cannot be used together; give one of them")
    kept = cache_folder() if args.cache_dir is None else Path(args.cache_dir)
    request = replace(request, cache=None if args.no_cache else kept)
    if args.time_limit is None:  # nobody has said how long a search may take: no longer than it can pay
        request = replace(request, plan=request.plan.worthwhile())
    return ScriptRequest(args.script, tuple(args.script_args or ()), request, args.verify_steps, args.strict, args.keep_placed)


def require_named_script(args: argparse.Namespace, command: str) -> None:
    """Raises OptionError for arguments of a script that is not named."""
    if args.script is None and args.script_args is not None:
        usage = f"baechi {command} SCRIPT -- ARGUMENTS"
        raise OptionError(f"what follows -- are the arguments of a script; name the script before it: {usage}")


def require_one_start(workers: str) -> None:
    """Raises OptionError where several processes were started, each of which would run all devices."""
    if workers == "thread" and number_of("WORLD_SIZE", 1) > 1:
        raise OptionError("several workers were started; give --workers=process, or start the script once, without torchrun")


def require_none_of(args: argparse.Namespace, names: Collection[str], why: str = "") -> None:
    """Raises OptionError where one of these flags was given, and says why; by default, as they say what a built-in model is or how long it
    runs."""
    given = next((name for name in args.given if name in names), None)
    if given is not None:
        raise OptionError(f"--{given} {why or f'is for built-in models; drop it, or give what {args.script} takes after --'}")


TRAIN = (add_flags, request_of)
