"""A network of your own, sharded by PaSE's search: written layer by layer, with sizes only, no weights and no framework. The answer is
into how many parts each loop of each layer is split over so many equal devices, so that the step takes least, and that nothing takes less.

    python examples/shard_network.py --devices=8 --batch=64 --out=shards.json

A model that exists already needs none of this: `baechi pase train.py -p 8` captures it from its training script.
"""

import argparse

from baechi_ext.shard.baselines import data_parallel
from baechi_ext.shard.layers import IMAGE, Layers, Value
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.plan import ShardPlan
from baechi_ext.shard.rules import Rules
from baechi_ext.shard.search import search


def network(batch: int, units: int) -> Layers:
    """A few convolutions, and a head with most of the parameters: where splitting by batch alone is dear."""
    layers = Layers("mine", Rules())
    x = Value((batch, 3, 64, 64), IMAGE)
    for channels in (32, 64):
        x = layers.pooling(layers.convolution(x, channels, (3, 3), pad=(1, 1), pointwise=1), (2, 2), 2)
    x = layers.flatten(x, (batch, 64 * 16 * 16), ("batch", "features"))
    x = layers.linear(x, units, "units", pointwise=1)
    layers.cross_entropy(layers.linear(x, 1000, "units"))
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--units", type=int, default=4096)
    parser.add_argument("--out", metavar="FILE")
    args = parser.parse_args()
    found = search(network(args.batch, args.units).graph(), Machine(devices=args.devices, tera_flops=10, gigabytes_per_second=16))
    plan = ShardPlan.of(found, args.batch, "default", {})
    for name, layer in plan.shard.items():
        print(f"{name:<14}", ", ".join(f"{axis} {parts}" for axis, parts in layer.splits.items()) or "not split")
    by_batch = data_parallel(found.tables).cost / found.cost
    print(f"{plan.status}: {plan.predicted_step_us:.4g} us a step; by batch alone {by_batch:.3g} times that")
    if args.out is not None:
        plan.save(args.out)


if __name__ == "__main__":
    main()
