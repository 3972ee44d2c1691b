"""The arguments of `baechi pase`: the original's, and what goes beyond it. Reading them loads no numpy."""

import argparse
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from baechi_ext.errors import OptionError, ShardError
from baechi_runtime.cli.flags import train as train_flags
from baechi_runtime.cli.flags.kinds import FILE, NAME, SIZE, SWITCH, Flag, Kind, add, add_group, add_output_flags, choice, named
from baechi_runtime.cli.flags.parser import meant
from baechi_runtime.host.as_main import require_script
from baechi_runtime.models.registry import MODELS, ModelOptions

if TYPE_CHECKING:
    from baechi_runtime.sharding.pase import PaseRequest

ALGORITHMS = {0: "generate_seq", 1: "breadth_first"}
"""The original's --algo, and the order that it is."""
DEFAULT_GRAPH, DEFAULT_BATCH = "alexnet", 128
MODEL_FLAGS = ("cost_path", *(f.name for f in fields(ModelOptions) if f.name not in ("seed", "num_devices")))
"""Arguments that only a captured model by name has."""
_ORIGINAL: dict[str, Flag] = {
    "flops": (Kind(float, "T"), "10^12 operations a second of a device (default %(default)g)", 10.0),
    "bw": (Kind(float, "G"), "GB/s between devices (default %(default)g)", 16.0),
    "profile": (SWITCH, "print where the time goes (cProfile)"),
    "measure": (SWITCH, "search several times and print the spread"),
}
_SEARCH: dict[str, Flag] = {
    "cost_model": (NAME, "default, or original: the release's costs, quirks included", "default"),
    "order": (NAME, "generate_seq (default), min_fill, min_table or breadth_first; all find the minimum"),
    "table_memory": (SIZE, "no table may be larger (default 128MiB)"),
    "beam": (
        Kind(int, "N"),
        "where a table would exceed --table_memory: follow the N best states in smaller tables, and report a bound on the loss",
    ),
    "halo": (SWITCH, "split height and width of images, too; the parts exchange their halos"),
}
_MACHINE: dict[str, Flag] = {
    "device_memory": (SIZE, "what a device can hold (default: no limit)"),
    "optimizer_words": (Kind(int, "N"), "numbers an optimizer keeps for a parameter (default 1)", 1),
    "latency": (Kind(float, "US"), "microseconds a message takes (default 0)", 0.0),
    "devices_per_node": (Kind(int, "N"), "two levels: this many devices share a node (default: all)"),
    "node_bw": (Kind(float, "G"), "GB/s of each device to other nodes (default: --bw)"),
    "node_latency": (Kind(float, "US"), "microseconds of a message between nodes (default: --latency)"),
    "overlap": (SWITCH, "sum up gradients of weights while the backward pass computes"),
}
_CAPTURED: dict[str, Flag] = {
    "model_name": (choice(MODELS), f"shard the captured training step of {', '.join(MODELS)} instead of a graph"),
    "cost_path": (FILE, "the model's costs as measured by `baechi train --costgen --optimizer=sgd`"),
    "executable": (SWITCH, "only what `baechi train --sharding` can run, and what that costs"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags `pase_request` reads. Values that make no sense are refused by the library, with exit code 1."""
    group = parser.add_argument_group("as the original PaSE has them")
    group.add_argument("-p", "--procs", type=int, default=8, metavar="N", help="devices (default %(default)s); any number, primes too")
    group.add_argument("-b", "--batch", type=int, metavar="N", help="examples a step (default 128; a captured model's own)")
    group.add_argument("-m", "--model", type=int, metavar="N", help="hidden width of rnnlm or transformer (default: as published)")
    group.add_argument("-g", "--graph", metavar="NAME", help="alexnet (default), resnet101, inception3, rnnlm, transformer or densenet121")
    add(group, _ORIGINAL)
    group.add_argument(
        "-d", "--dump_graph", nargs="?", const="graph.dot", metavar="FILE", help="write the graph in dot format (graph.dot unless named)"
    )
    group.add_argument("--algo", type=int, default=0, choices=ALGORITHMS, help="0: GenerateSeq (default); 1: breadth first, the naive one")
    group.add_argument("-a", "--analyse", action="store_true", help="print where the cost lies, by kind and by layer")
    add_group(parser, "search", _SEARCH)
    add_group(parser, "devices", _MACHINE)
    script = "a training script, whose first module that trains is captured instead; its arguments follow --"
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help=script)
    add_group(parser, "captured model", _CAPTURED)
    train_flags.add_model_flags(parser)
    add(parser, {"compare": (SWITCH, "print what data parallelism, experts and a random walk would cost")})
    add_output_flags(parser, out="write the shard plan to this file")


def pase_request(args: argparse.Namespace) -> "PaseRequest":
    """The request for `baechi pase`. Raises OptionError for an unknown graph, ShardError for what makes no sense, and
    FileError for a script that is not there."""
    from baechi_ext.shard.machine import Machine
    from baechi_ext.shard.networks import NETWORKS, network
    from baechi_ext.shard.search import DEFAULT_TABLE_BYTES, SearchOptions
    from baechi_runtime.sharding.pase import PaseRequest

    if args.algo and args.order not in (None, ALGORITHMS[args.algo]):
        raise ShardError(f"--algo={args.algo} is the order {ALGORITHMS[args.algo]}, and --order={args.order} another; give one of them")
    _require_one_source(args)
    options = _captured_options(args) if args.model_name is not None else None
    original = args.cost_model == "original"
    machine = Machine(
        devices=args.procs,
        tera_flops=args.flops,
        gigabytes_per_second=args.bw,
        word_bytes=8 if original else 4,
        latency_us=args.latency,
        devices_per_node=args.devices_per_node,
        node_gigabytes_per_second=args.node_bw,
        node_latency_us=args.node_latency,
        overlap=args.overlap,
        memory_bytes=args.device_memory,
        optimizer_words=args.optimizer_words,
    )
    search = SearchOptions(
        order=args.order or ALGORITHMS[args.algo],
        original=original,
        table_bytes=DEFAULT_TABLE_BYTES if args.table_memory is None else args.table_memory,
        beam=args.beam,
    )
    if args.script is not None:
        require_script(args.script)
    name, batch = args.graph or DEFAULT_GRAPH, DEFAULT_BATCH if args.batch is None else args.batch
    if name not in NETWORKS:
        raise OptionError(f"unknown graph {name!r}{meant(name, NETWORKS)}; choose one of {', '.join(NETWORKS)}")
    by_hand = None
    if args.script is None and options is None:
        by_hand = network(name, batch, args.model, cost_model=args.cost_model, splits_images=args.halo)
    values = named(PaseRequest, args) | {
        "graph": args.script or args.model_name or name,
        "network": by_hand,
        "batch": batch,
        "width": args.model,
        "splits_images": args.halo,
        "machine": machine,
        "options": search,
        "script_arguments": tuple(args.script_args or ()),
        "model_options": options,
        "dump": args.dump_graph,
    }
    return PaseRequest(**values)


def _require_one_source(args: argparse.Namespace) -> None:
    """Raises ShardError for flags that belong to another kind of graph than the one that is asked for."""
    sources = {"--graph": args.graph, "--model_name": args.model_name, "SCRIPT": args.script}
    given = [f"{flag}={value}" for flag, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ShardError(f"{' and '.join(given)} are graphs of their own; give one of them")
    if args.script is None and args.script_args is not None:
        raise ShardError("what follows -- are the arguments of a script; name the script before it: baechi pase SCRIPT -- ARGUMENTS")
    captured = args.model_name is not None or args.script is not None
    if captured and args.model is not None:
        raise ShardError("-m is the width of a graph by hand; a captured model's sizes are flags of their own, as --d_model")
    if captured and args.cost_model != "default":
        raise ShardError(f"--cost_model={args.cost_model} is for the graphs by hand; captured models have the default one")
    sizes = [name for name in MODEL_FLAGS if getattr(args, name) is not None]
    if args.model_name is None and sizes:
        raise ShardError(f"--{sizes[0]} is of a captured model; name the model (--model_name)")
    if args.script is not None and args.batch is not None:
        raise ShardError("-b is the batch of a graph; a script has its own, by its arguments after --")


def _captured_options(args: argparse.Namespace) -> ModelOptions:
    """The options of a captured model. Raises ShardError for a batch below 1 or too large, or two different ones."""
    from baechi_ext.shard.graph import MOST_ITERATIONS

    if None not in (args.batch, args.batch_size) and args.batch != args.batch_size:
        raise ShardError(f"-b {args.batch} and --batch_size={args.batch_size} are the same; give one of them")
    if args.batch is not None and args.batch < 1:
        raise ShardError(f"a batch of {args.batch}; give 1 or more (-b)")
    if args.batch is not None and args.batch > MOST_ITERATIONS:
        raise ShardError(f"a batch of {args.batch}; the limit is {MOST_ITERATIONS} (-b)")
    chosen = train_flags.model_options(args, num_devices=1)
    return chosen if args.batch is None else replace(chosen, batch_size=args.batch)


PASE = (add_flags, pase_request)
