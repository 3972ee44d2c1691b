"""The flags of `baechi train`, and the one checked request they become: a TrainRequest, or for a script of the user's own a ScriptRequest.

Reading them loads no framework; making the request does.
"""

import argparse
import os
from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from baechi_ext.errors import OptionError
from baechi_ext.ir import Cluster
from baechi_runtime.cli.flags import baechi as baechi_flags
from baechi_runtime.cli.flags import batch as batch_flags
from baechi_runtime.cli.flags import common as flags
from baechi_runtime.cli.flags import config as config_flags
from baechi_runtime.models.options.gnmt_v2 import ENCODER_TYPES, UNIT_TYPES
from baechi_runtime.models.registry import FRAMEWORKS, MODELS, ModelOptions
from baechi_runtime.tensorflow.coarse import COARSE, begins_coarse

if TYPE_CHECKING:
    from baechi_runtime.drivers.train_request import RunOptions, ScriptRequest, TrainRequest

TORCH, TENSORFLOW = "torch", "tensorflow"
OPTIMIZERS = ("sgd", "momentum", "rmsprop", "adagrad", "adadelta", "adam", "adamw")
DEFAULT_DEVICES = 2
DEFAULT_WORKERS = {TORCH: "thread", TENSORFLOW: "process"}
WORKERS = {"thread": None, "process": None}
CHECKPOINT_EVERY = 100
VERIFY_STEPS = 2
OF_MODELS = {"model_name", "optimizer", "learning_rate", *(f.name for f in fields(ModelOptions) if f.name != "num_devices")}
"""The flags that say what a built-in model's step is."""
OF_RUNS = {"num_steps", "train_steps", "checkpoint", "checkpoint_every", "resume"}
"""Those that say how long `baechi train` runs it."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of the sub-command."""
    _add_script_flags(parser)
    group = add_shared_flags(parser)
    _add_sharding_flags(group)
    batch_flags.add_flags(parser)
    parser.add_argument_group("costs").add_argument(
        "--costgen", action="store_true", help="only profile, and write the costs to --cost_path"
    )
    _add_training_flags(parser)
    baechi_flags.add_flags(parser)


def add_shared_flags(parser: argparse.ArgumentParser, *, method: bool = True) -> argparse._ArgumentGroup:
    """Those that `compare` takes, too, except --placement_method where that is asked for; and the group of devices, for more."""
    parser.set_defaults(script=None, script_args=None, costgen=False, sharding=(), mesh=None, log_device_placement=False)
    parser.set_defaults(train_steps=None, checkpoint=None, checkpoint_every=None, resume=False)
    batch_flags.set_defaults(parser)
    _add_step_flags(parser)
    add_model_flags(parser)
    flags.add_placing_flags(parser, method=method)
    group = _add_device_flags(parser)
    parser.add_argument_group("costs").add_argument(
        "--cost_path", metavar="FILE", help="read costs from this file instead of profiling (with --costgen: write them; cost.json)"
    )
    _add_run_flags(parser)
    config_flags.add_flag(parser)
    return group


def add_script(parser: argparse.ArgumentParser, what: str) -> None:
    """The script alone."""
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help=f"{what}; its arguments follow --")


def _add_script_flags(parser: argparse.ArgumentParser) -> None:
    """The script itself, and how its training calls are placed."""
    add_script(parser, "a training script, run unmodified with its model placed, instead of a built-in model")
    group = parser.add_argument_group("script")
    group.add_argument(
        "--verify_steps",
        type=flags.whole,
        default=VERIFY_STEPS,
        metavar="N",
        help="first calls that are also run unplaced, and compared; later ones are more and more seldom (default %(default)s; 0: none)",
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="stop where a script's model can't be placed, or differs; otherwise it then runs as it is, and the reason is said once",
    )
    group.add_argument(
        "--keep_placed",
        action="store_true",
        help="stay placed whether or not that is faster; without it placed and plain steps take turns at first, and the faster is kept",
    )
    group.add_argument(
        "--no_cache", action="store_true", help="measure and search anew, whatever earlier runs of a script have kept, and keep nothing"
    )
    group.add_argument(
        "--cache_dir",
        metavar="DIR",
        help="where a script's plans and costs are kept for its next run ($BAECHI_CACHE, else baechi in $XDG_CACHE_HOME or ~/.cache)",
    )
    group.add_argument("--fallback", action="store_true", help=argparse.SUPPRESS)  # the default by now


def _add_step_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training step")
    names = "; ".join(f"{name}: {model.help}" for name, model in MODELS.items())
    others = "; ".join(f"{name}: {model.help}" for name, model in FRAMEWORKS[TENSORFLOW].items())
    names = f"{names}\nwith --framework=tensorflow: {others}\n"
    add_framework_flag(group)
    group.add_argument(
        "--model_name", type=flags.one_of(MODELS), default="inception_v3", metavar="NAME", help=f"{names} (default %(default)s)"
    )
    group.add_argument("--optimizer", type=_optimizer, default="sgd", metavar="NAME", help=f"{', '.join(OPTIMIZERS)} (default %(default)s)")
    group.add_argument("--learning_rate", type=flags.positive, default=0.01, metavar="F", help="default %(default)s")
    group.add_argument("--colocate_grads_with_ops", action="store_true", help="run each backward op where its forward op runs")
    group.add_argument(
        "--relaxed_random", action="store_true", help="let dropout run anywhere, in any order; parity with the unplaced step is lost"
    )


def add_framework_flag(group: argparse._ArgumentGroup) -> None:
    """--framework."""
    group.add_argument(
        "--framework",
        type=flags.one_of(dict.fromkeys(FRAMEWORKS)),
        default=TORCH,
        metavar="NAME",
        help=f"{', '.join(FRAMEWORKS)} (default %(default)s)",
    )


def _optimizer(text: str) -> str:
    if text == "ftrl":
        raise argparse.ArgumentTypeError("ftrl is TensorFlow's alone; choose adagrad, which scales each weight's steps in the same way")
    return flags.one_of(dict.fromkeys(OPTIMIZERS))(text)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The fields of ModelOptions; a flag that is not given leaves the model its own default."""
    group = parser.add_argument_group("model", "A flag that is not given leaves the model's own default.")
    sizes = {
        "batch_size": ("N", ""),
        "image_size": ("PIXELS", "height and width; "),
        "vocab_size": ("N", "vocabulary size; "),
        "max_seq_length": ("N", "words per sentence; "),
        "rnn_units": ("N", "units per layer; "),
        "num_layers": ("N", "layers of the network, or of encoder and decoder each; "),
        "rnn_chunk": ("N", "time steps per op; "),
        "nasnet_cells": ("N", "normal cells between reductions; "),
        "nasnet_filters": ("N", "filters of the first cells; "),
        "resnet_filters": ("N", "filters of the first stage; "),
        "d_model": ("N", "width of the residual stream; "),
        "d_ff": ("N", "width inside feed-forward layers; "),
        "num_heads": ("N", "heads per attention; "),
    }
    for name, (metavar, what) in sizes.items():
        group.add_argument(f"--{name}", type=flags.at_least_one, metavar=metavar, help=what + _takers(name))
    for name, values in {"rnn_unit_type": UNIT_TYPES, "encoder_type": ENCODER_TYPES}.items():
        choose = flags.one_of(dict.fromkeys(values))
        group.add_argument(f"--{name}", type=choose, metavar="NAME", help=f"{', '.join(values)}; " + _takers(name))
    dropped = "dropout rate; "
    group.add_argument("--dropout", type=flags.from_zero_to_one, metavar="F", help=dropped + _takers("dropout"))
    group.add_argument("--residual", action="store_true", default=None, help="add a layer's input to its output; " + _takers("residual"))
    group.add_argument("--large", action="store_true", default=None, help="the network for ImageNet; " + _takers("large"))


def _takers(name: str) -> str:
    return f"for {', '.join(model for model, entry in MODELS.items() if name in entry.takes)}"


def _add_device_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("devices")
    group.add_argument("--num_devices", type=flags.number_of_devices, metavar="N", help=f"CPU workers (default {DEFAULT_DEVICES})")
    group.add_argument("--num_gpus", type=flags.number_of_devices, metavar="N", help="CUDA devices; ignored if --num_devices is given")
    add_gpu_flags(group)
    group.add_argument("--cuda_graphs", action="store_true", help="replay a device's ops between transfers as a CUDA graph, where it pays")
    group.add_argument(
        "--workers",
        type=flags.one_of(WORKERS),
        metavar="KIND",
        help="thread: all devices in this process; process: a process per device, with memory of its own (default thread; for TensorFlow "
        "process)",
    )
    _add_host_flags(group)
    group.add_argument("--cluster", metavar="FILE", help="a cluster file instead of the machine's own memory and a probed link")
    group.add_argument("--device_memory", type=flags.size_in_bytes, metavar="SIZE", help="memory of each device: 16GiB, 800MB, or bytes")
    group.add_argument(
        "--memory_fraction",
        type=flags.fraction,
        default=1.0,
        metavar="F",
        help="the fraction of each device's memory that a plan may use (default 1)",
    )
    group.add_argument(
        "--comm_cost_coeffs",
        type=flags.link_of_coefficients,
        metavar="A,B",
        help="sending n bytes takes A*n + B microseconds; without it the link is probed",
    )
    return group


def add_gpu_flags(group: argparse._ArgumentGroup) -> None:
    """--split_gpu and --use_free_memory."""
    group.add_argument(
        "--split_gpu", type=flags.number_of_devices, metavar="N", help="run the first GPU as N devices, to try a plan for N GPUs on one"
    )
    group.add_argument(
        "--use_free_memory",
        action="store_true",
        help="plan with the memory that is free on the GPUs now, so that a plan depends on what else runs; needs nvidia-ml-py",
    )


def _add_host_flags(group: argparse._ArgumentGroup) -> None:
    """--cluster_hosts and --task_index."""
    group.add_argument(
        "--cluster_hosts",
        type=_hosts,
        metavar="HOST:PORT,...",
        help="TensorFlow: a device on each of these; the same command runs on every host, with its --task_index",
    )
    group.add_argument(
        "--task_index",
        type=flags.whole,
        metavar="N",
        help="which of --cluster_hosts this is; 0, the default, places and measures, the others serve",
    )


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


def _add_sharding_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sharding",
        type=_names,
        default=(),
        metavar="NAMES",
        help="split every layer over worker processes instead of placing ops: pase (the cheapest way found), data_parallel, expert, ddp or "
        "fsdp2 (torch's own data parallelism), or a shard plan file; several with commas between them are compared",
    )
    group.add_argument("--mesh", type=_shape, metavar="NxN", help="the mesh of these processes (default: their number's prime factors)")


def _names(text: str) -> tuple[str, ...]:
    """Flag type: names with commas between them, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} names no strategy; give pase, data_parallel, expert, ddp, fsdp2 or a shard plan file")
    return names


def _shape(text: str) -> tuple[int, ...]:
    """Flag type: 2x2."""
    try:
        shape = tuple(int(part) for part in text.split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh; give its sizes as 2x2")
    return shape


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument(
        "--num_steps", type=flags.at_least_one, default=15, metavar="N", help="measured steps of each variant (default %(default)s)"
    )
    group.add_argument(
        "--timeout", type=flags.positive, default=300.0, metavar="SECONDS", help="for a device to answer (default %(default)g)"
    )
    group.add_argument("--out", metavar="DIR", help="keep graph, profile, plan and report there as JSON")
    group.add_argument("--json", action="store_true", help="print the report as JSON")


def _add_training_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training on", "With --train_steps the placed model is trained instead of timed.")
    group.add_argument("--train_steps", type=flags.at_least_one, metavar="N", help="train until step N, and print the losses")
    group.add_argument("--checkpoint", metavar="DIR", help="keep the last two checkpoints there")
    group.add_argument(
        "--checkpoint_every",
        type=flags.at_least_one,
        metavar="K",
        help=f"a checkpoint after every K steps, and after the last (default {CHECKPOINT_EVERY})",
    )
    group.add_argument("--resume", action="store_true", help="go on from the last checkpoint; from the start where there is none yet")


def train_request(args: argparse.Namespace) -> "TrainRequest":
    """The request the flags ask for. Raises OptionError where they contradict each other, FileError or ClusterError for a bad file."""
    _settle_sharding(args)
    settle_framework(args)
    plan = flags.plan_request(args)
    cluster = None if args.cluster is None else Cluster.load(args.cluster)
    if cluster is not None and args.comm_cost_coeffs is not None:
        raise OptionError("--cluster and --comm_cost_coeffs exclude each other; give one of them")
    cuda = wants_cuda(args)
    from baechi_runtime.drivers.train_request import TrainRequest

    num_devices = number_given(args) or (len(cluster) if cluster is not None else DEFAULT_DEVICES)
    return TrainRequest(
        model=args.model_name,
        plan=plan,
        model_options=model_options(args, num_devices),
        optimizer=args.optimizer,
        learning_rate=args.learning_rate,
        colocate_grads_with_ops=args.colocate_grads_with_ops,
        relaxed_random=args.relaxed_random,
        microbatches=batch_flags.microbatches_of(args, splits=args.script is None and not args.sharding and args.framework == TORCH),
        batch_norm_per_part=args.batch_norm == batch_flags.PER_PART,
        num_devices=num_devices,
        cuda=cuda,
        cuda_graphs=_wants_graphs(args),
        split_gpu=args.split_gpu is not None,
        use_free_memory=args.use_free_memory,
        workers=args.workers,
        cluster=cluster,
        device_memory=args.device_memory,
        memory_fraction=args.memory_fraction * args.placer_memory_fraction,
        link=args.comm_cost_coeffs,
        comm_cost_factor=args.comm_cost_factor,
        cost_path=args.cost_path,
        costgen=args.costgen,
        num_steps=args.num_steps,
        timeout_seconds=args.timeout,
        out=args.out,
        log_device_placement=args.log_device_placement,
        run=_run_options(args),
        sharding=args.sharding,
        mesh=args.mesh,
        command=flags.command_of(args),
        framework=args.framework,
        cluster_hosts=args.cluster_hosts,
        task_index=args.task_index or 0,
    )


def model_options(args: argparse.Namespace, num_devices: int) -> ModelOptions:
    """The model options that the flags of `add_model_flags` give."""
    given = {f.name: getattr(args, f.name) for f in fields(ModelOptions) if f.name != "num_devices" and hasattr(args, f.name)}
    return ModelOptions(**given, num_devices=num_devices)


def _settle_sharding(args: argparse.Namespace) -> None:
    """Makes --sharding's step run in worker processes. Raises OptionError where another flag contradicts --sharding."""
    if args.mesh is not None and not args.sharding:
        raise OptionError("--mesh is for --sharding; give --sharding=pase as well")
    if not args.sharding:
        return
    if args.script is not None:
        raise OptionError(f"--sharding splits a built-in model; baechi pase {args.script} finds how a script's layers are best split")
    for flag, given in {
        f"--framework={args.framework}": args.framework == TENSORFLOW,
        "--workers=thread": args.workers == "thread",
        "--costgen": args.costgen,
        "--cluster": args.cluster is not None,
    }.items():
        if given:
            raise OptionError(f"--sharding splits a built-in model of torch's over worker processes; drop {flag}")
    args.workers = "process"


def settle_framework(args: argparse.Namespace) -> None:
    """Fills in what depends on the framework: kind of workers, and with --cluster_hosts their number. Raises OptionError where flags
    contradict each other."""
    if args.workers is None:
        args.workers = DEFAULT_WORKERS[args.framework]
        if args.framework == TENSORFLOW and (args.split_gpu is not None or (args.num_devices is None and args.num_gpus is not None)):
            args.workers = "thread"  # one process drives all GPUs
    method = getattr(args, "placement_method", None)
    if args.framework == TENSORFLOW and method is not None and begins_coarse(method) and args.grouper is None and args.placer_type is None:
        args.grouper, args.placer_type = COARSE
    hosts = getattr(args, "cluster_hosts", None)
    if hosts is None:
        if getattr(args, "task_index", None) is not None:
            raise OptionError("--task_index is a place in --cluster_hosts; give that as well")
        return
    if args.framework != TENSORFLOW:
        advice = "with PyTorch start the workers by torchrun (docs/several_nodes.md)"
        raise OptionError(f"--cluster_hosts is for --framework=tensorflow; {advice}")
    if args.workers != "process":
        raise OptionError("--cluster_hosts names servers; drop --workers=thread")
    if args.num_devices not in (None, len(hosts)) or args.split_gpu is not None:
        raise OptionError(f"--cluster_hosts names {len(hosts)} devices; drop --num_devices and --split_gpu")
    if not 0 <= (args.task_index or 0) < len(hosts):
        raise OptionError(f"--task_index={args.task_index} is none of the {len(hosts)} places in --cluster_hosts, which begin with 0")
    args.num_devices = len(hosts)


def wants_cuda(args: argparse.Namespace) -> bool:
    """True if the devices are CUDA devices. Raises OptionError where flags contradict each other."""
    if args.split_gpu is not None:
        for other in ("num_devices", "num_gpus"):
            if getattr(args, other) is not None:
                raise OptionError(f"--split_gpu and --{other} exclude each other; give one of them")
        if args.workers == "process":
            raise OptionError("--split_gpu is for one process; drop --workers=process")
        return True
    cuda = args.num_devices is None and args.num_gpus is not None
    if args.use_free_memory and not cuda:
        raise OptionError("--use_free_memory is for CUDA devices; add --num_gpus=N, or drop it")
    return cuda


def _wants_graphs(args: argparse.Namespace) -> bool:
    """--cuda_graphs. Raises OptionError where there can be none."""
    if args.cuda_graphs and (args.workers == "process" or not wants_cuda(args)):
        raise OptionError("--cuda_graphs is for CUDA devices of one process; add --num_gpus=N or --split_gpu=N, and no --workers=process")
    return bool(args.cuda_graphs)


def number_given(args: argparse.Namespace) -> int | None:
    """The number of devices that the flags give; None where they leave it open."""
    given: int | None = args.split_gpu or (args.num_gpus if wants_cuda(args) else args.num_devices)
    return given


def _run_options(args: argparse.Namespace) -> "RunOptions | None":
    """None without --train_steps. Raises OptionError where the flags contradict each other."""
    needs = {"--checkpoint": args.checkpoint is not None, "--checkpoint_every": args.checkpoint_every is not None, "--resume": args.resume}
    for flag, given in needs.items():
        if given and args.train_steps is None:
            raise OptionError(f"{flag} is for a training; give --train_steps=N as well")
        if given and args.checkpoint is None:
            raise OptionError(f"{flag} needs a folder; give --checkpoint=DIR as well")
    if args.train_steps is None:
        return None
    if args.costgen:
        raise OptionError("--costgen only profiles and --train_steps trains; give one of them")
    from baechi_runtime.drivers.train_request import RunOptions

    every = args.checkpoint_every or CHECKPOINT_EVERY
    return RunOptions(args.train_steps, args.checkpoint, every, args.resume, flags.command_of(args))


def script_request(args: argparse.Namespace) -> "ScriptRequest":
    """The request the flags ask for. Raises OptionError where they contradict each other."""
    settle_framework(args)
    if args.costgen:
        raise OptionError("--costgen profiles a built-in model; drop it, and --out=DIR keeps the profile of a script's model")
    require_none_of(args, {*OF_MODELS, *OF_RUNS})
    require_one_start(args.workers)
    request = train_request(args)
    if args.workers == "process" and request.cuda:
        raise OptionError("a script's model runs on all CUDA devices of a machine from one process; drop --workers=process")
    if request.cuda_graphs:
        raise OptionError("--cuda_graphs is for built-in models; drop it")
    from baechi_runtime.drivers.train_request import ScriptRequest

    request = replace(request, cache=_cache_of(args))
    if args.time_limit is None:  # nobody has said how long a search may take: no longer than it can pay
        request = replace(request, plan=request.plan.worthwhile())
    return ScriptRequest(args.script, tuple(args.script_args or ()), request, args.verify_steps, args.strict, args.keep_placed)


def _cache_of(args: argparse.Namespace) -> Path | None:
    if args.no_cache and args.cache_dir is not None:
        raise OptionError("--no_cache and --cache_dir exclude each other; give one of them")
    from baechi_runtime.host.cache_folder import cache_folder

    if args.no_cache:
        return None
    return cache_folder() if args.cache_dir is None else Path(args.cache_dir)


def require_one_start(workers: str) -> None:
    """Raises OptionError where several processes were started, each of which would run all devices."""
    if workers == "thread" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise OptionError("several workers were started; give --workers=process, or start the script once, without torchrun")


def require_none_of(args: argparse.Namespace, names: Collection[str]) -> None:
    """Raises OptionError where one of these flags was given, which say what a built-in model is or how long it runs."""
    given = next((name for name in args.given if name in names), None)
    if given is not None:
        raise OptionError(f"--{given} is for built-in models; drop it, or give what {args.script} takes after --")
