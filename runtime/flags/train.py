"""The flags of `baechi train`, and the TrainRequest they become. Reading them loads no framework; making the request does."""

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING

from baechi_ext.errors import OptionError
from baechi_ext.ir import Cluster
from runtime.flags import baechi as baechi_flags
from runtime.flags import common as flags
from runtime.flags import config as config_flags
from runtime.flags import cuda as cuda_flags
from runtime.flags import run as run_flags
from runtime.flags import script as script_flags
from runtime.flags import sharding as sharding_flags
from runtime.flags import tensorflow as tensorflow_flags
from runtime.models.registry import FRAMEWORKS, MODELS, ModelOptions

if TYPE_CHECKING:
    from runtime.link_report import ProbeRequest
    from runtime.train_request import TrainRequest

OPTIMIZERS = ("sgd", "momentum", "rmsprop", "adagrad", "adadelta", "adam", "adamw")
DEFAULT_DEVICES = 2
WORKERS = {"thread": None, "process": None}
RNN_UNIT_TYPES = ("lstm", "gru")
ENCODER_TYPES = ("gnmt", "bi", "uni")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of the sub-command."""
    script_flags.add_flags(parser)
    group = add_shared_flags(parser)
    sharding_flags.add_flags(group)
    parser.add_argument_group("costs").add_argument(
        "--costgen", action="store_true", help="only profile, and write the costs to --cost_path"
    )
    run_flags.add_flags(parser)
    baechi_flags.add_flags(parser)


def add_shared_flags(parser: argparse.ArgumentParser, *, method: bool = True) -> argparse._ArgumentGroup:
    """Those that `compare` takes, too, except --placement_method where that is asked for; and the group of devices, for more."""
    parser.set_defaults(script=None, script_args=None, costgen=False, sharding=(), mesh=None, log_device_placement=False)
    parser.set_defaults(train_steps=None, checkpoint=None, checkpoint_every=None, resume=False)
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


def _add_step_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training step")
    names = "; ".join(f"{name}: {model.help}" for name, model in MODELS.items())
    others = "; ".join(f"{name}: {model.help}" for name, model in FRAMEWORKS[tensorflow_flags.TENSORFLOW].items())
    names = f"{names}\nwith --framework=tensorflow: {others}\n"
    tensorflow_flags.add_framework_flag(group)
    group.add_argument(
        "--model_name", type=flags.one_of(MODELS), default="inception_v3", metavar="NAME", help=f"{names} (default %(default)s)"
    )
    group.add_argument("--optimizer", type=_optimizer, default="sgd", metavar="NAME", help=f"{', '.join(OPTIMIZERS)} (default %(default)s)")
    group.add_argument("--learning_rate", type=flags.positive, default=0.01, metavar="F", help="default %(default)s")
    group.add_argument("--colocate_grads_with_ops", action="store_true", help="each backward op runs where its forward op runs")
    group.add_argument(
        "--relaxed_random", action="store_true", help="let dropout run anywhere, in any order; parity with the unplaced step is lost"
    )


def _optimizer(text: str) -> str:
    if text == "ftrl":
        raise argparse.ArgumentTypeError("ftrl is TensorFlow's alone; choose adagrad, which scales each weight's steps in the same way")
    return flags.one_of(dict.fromkeys(OPTIMIZERS))(text)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The fields of ModelOptions; a flag that is not given leaves the model its own default."""
    group = parser.add_argument_group("model", "Where a flag is not given, the model's own default counts.")
    sizes = {
        "batch_size": ("N", ""),
        "image_size": ("PIXELS", "height and width; "),
        "vocab_size": ("N", "words of a language; "),
        "max_seq_length": ("N", "words of every sentence; "),
        "rnn_units": ("N", "width of all layers; "),
        "num_layers": ("N", "of the network, or of encoder and decoder each; "),
        "rnn_chunk": ("N", "time steps per op; "),
        "nasnet_cells": ("N", "normal cells between reductions; "),
        "nasnet_filters": ("N", "of the first cells; "),
        "resnet_filters": ("N", "of the first stage; "),
        "d_model": ("N", "width of what passes from layer to layer; "),
        "d_ff": ("N", "width inside feed-forward layers; "),
        "num_heads": ("N", "of every attention; "),
    }
    for name, (metavar, what) in sizes.items():
        group.add_argument(f"--{name}", type=flags.at_least_one, metavar=metavar, help=what + _takers(name))
    for name, values in {"rnn_unit_type": RNN_UNIT_TYPES, "encoder_type": ENCODER_TYPES}.items():
        choose = flags.one_of(dict.fromkeys(values))
        group.add_argument(f"--{name}", type=choose, metavar="NAME", help=f"{', '.join(values)}; " + _takers(name))
    dropped = "the part of the activations that dropout zeroes; "
    group.add_argument("--dropout", type=flags.from_zero_to_one, metavar="F", help=dropped + _takers("dropout"))
    group.add_argument("--residual", action="store_true", default=None, help="add a layer's input to its output; " + _takers("residual"))
    group.add_argument("--large", action="store_true", default=None, help="the network for ImageNet; " + _takers("large"))


def _takers(name: str) -> str:
    return f"for {', '.join(model for model, entry in MODELS.items() if name in entry.takes)}"


OF_MODELS = {"model_name", "optimizer", "learning_rate", *(f.name for f in fields(ModelOptions) if f.name != "num_devices")}
"""The flags that say what a built-in model's step is."""
OF_RUNS = {"num_steps", "train_steps", "checkpoint", "checkpoint_every", "resume"}
"""Those that say how long `baechi train` runs it."""


def model_options(args: argparse.Namespace, num_devices: int) -> ModelOptions:
    """What the flags of `add_model_flags` ask for."""
    given = {f.name: getattr(args, f.name) for f in fields(ModelOptions) if f.name != "num_devices" and hasattr(args, f.name)}
    return ModelOptions(**given, num_devices=num_devices)


def _add_device_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("devices")
    group.add_argument("--num_devices", type=flags.number_of_devices, metavar="N", help=f"CPU workers (default {DEFAULT_DEVICES})")
    group.add_argument(
        "--num_gpus", type=flags.number_of_devices, metavar="N", help="CUDA devices; --num_devices wins where both are given"
    )
    cuda_flags.add_flags(group)
    cuda_flags.add_graphs_flag(group)
    group.add_argument(
        "--workers",
        type=flags.one_of(WORKERS),
        metavar="KIND",
        help="thread: all devices in this process; process: a process per device, with memory of its own (default thread; for TensorFlow "
        "process)",
    )
    tensorflow_flags.add_host_flags(group)
    group.add_argument("--cluster", metavar="FILE", help="a cluster file instead of the machine's own memory and a probed link")
    group.add_argument("--device_memory", type=flags.size_in_bytes, metavar="SIZE", help="of every device: 16GiB, 800MB, or bytes")
    group.add_argument(
        "--memory_fraction",
        type=flags.fraction,
        default=1.0,
        metavar="F",
        help="the part of each device's memory a plan may use (default 1)",
    )
    group.add_argument(
        "--comm_cost_coeffs",
        type=flags.link_of_coefficients,
        metavar="A,B",
        help="sending n bytes takes A*n + B microseconds; without it the link is probed",
    )
    return group


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


def request_of(args: argparse.Namespace) -> "TrainRequest":
    """The request the flags ask for. Raises OptionError where they contradict each other, FileError or ClusterError for a bad file."""
    sharding_flags.settle(args)
    tensorflow_flags.settle(args)
    plan = flags.request_of(args)
    cluster = None if args.cluster is None else Cluster.load(args.cluster)
    if cluster is not None and args.comm_cost_coeffs is not None:
        raise OptionError("--cluster and --comm_cost_coeffs exclude each other; give one of them")
    cuda = cuda_flags.wants_cuda(args)
    from runtime.train_request import TrainRequest

    num_devices = cuda_flags.number_given(args) or (len(cluster) if cluster is not None else DEFAULT_DEVICES)
    return TrainRequest(
        model=args.model_name,
        plan=plan,
        model_options=model_options(args, num_devices),
        optimizer=args.optimizer,
        learning_rate=args.learning_rate,
        colocate_grads_with_ops=args.colocate_grads_with_ops,
        relaxed_random=args.relaxed_random,
        num_devices=num_devices,
        cuda=cuda,
        cuda_graphs=cuda_flags.graphs_wanted(args),
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
        run=run_flags.options_of(args),
        sharding=args.sharding,
        mesh=args.mesh,
        command=flags.command_of(args),
        **tensorflow_flags.fields_of(args),
    )


def add_probe_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `probe-links`."""
    group = parser.add_argument_group("devices")
    group.add_argument("--num_devices", type=flags.number_of_devices, metavar="N", help=f"CPU workers (default {DEFAULT_DEVICES})")
    group.add_argument("--num_gpus", type=flags.number_of_devices, metavar="N", help="CUDA devices; --num_devices wins over it")
    cuda_flags.add_flags(group)
    workers = "thread or process (default thread; TensorFlow: process)"
    group.add_argument("--workers", type=flags.one_of(WORKERS), metavar="KIND", help=workers)
    tensorflow_flags.add_framework_flag(group)
    group = parser.add_argument_group("run")
    group.add_argument(
        "--max_exponent", type=_exponent, default=29, metavar="E", help="tensors of 2^0 to 2^E floats, or what memory allows (default 29)"
    )
    group.add_argument("--timeout", type=flags.positive, default=300.0, metavar="SECONDS", help="for a device to answer (default 300)")
    group.add_argument("--out", metavar="FILE", help="write a cluster file, which --cluster reads")
    group.add_argument("--samples", metavar="FILE", help="keep every sample as JSON")
    group.add_argument("--json", action="store_true", help="print the report as JSON")


def _exponent(text: str) -> int:
    """Flag type: 3 to 29; a line and its bend need a few sizes."""
    value = flags.whole(text)
    if not 3 <= value <= 29:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 3 to 29")
    return value


def probe_request_of(args: argparse.Namespace) -> "ProbeRequest":
    """The request that the flags of `probe-links` ask for."""
    tensorflow_flags.settle(args)
    cuda = cuda_flags.wants_cuda(args)
    from runtime.link_report import ProbeRequest

    return ProbeRequest(
        num_devices=cuda_flags.number_given(args) or DEFAULT_DEVICES,
        cuda=cuda,
        split_gpu=args.split_gpu is not None,
        use_free_memory=args.use_free_memory,
        workers=args.workers,
        max_exponent=args.max_exponent,
        out=args.out,
        samples=args.samples,
        timeout_seconds=args.timeout,
        framework=args.framework,
        command=flags.command_of(args),
    )
