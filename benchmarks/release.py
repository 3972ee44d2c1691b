"""Places one graph with the released code of Baechi, in a process of its own.

    python -m benchmarks.release {baechi,baechi_torch} CHECKOUT GRAPH.json --cluster=CLUSTER.json --method=m_etf [--fused]

Prints {"placement": ..., "priority": ..., "seconds": ...}, in the graph's order. Where an assertion of the release fails, which is
how it ends where memory runs out, it prints {"status": "unknown", "error": ...}, with exit code 1. Nothing of the release is copied
here. What is fed to it, and what stands in for the libraries it needs, is in release_baechi.py and release_baechi_torch.py.
"""

import importlib
import json
import logging
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from baechi_ext.ir import Cluster, OpGraph
from benchmarks import release_baechi, release_baechi_torch
from benchmarks.runner import parsed

RELEASES = {"baechi": release_baechi, "baechi_torch": release_baechi_torch}


def require_checkout(name: str, folder: Path) -> None:
    """Raises SystemExit where the placers are not there."""
    release = RELEASES[name]
    file = Path(release.PATHS[-1], *release.MODULE.split(".")).with_suffix(".py")
    if not (folder / file).is_file():
        raise SystemExit(f"error: {folder} has no {file}; give --{name} the folder of a checkout of {release.REPOSITORY}")


FLAGS = {
    "release": {"choices": tuple(RELEASES)},
    "checkout": {"type": Path},
    "graph": {"type": Path},
    "--cluster": {"type": Path, "required": True},
    "--method": {"choices": ("m_etf", "m_sct"), "required": True},
    "--fused": {"action": "store_true"},
    "--cpu_limit": {"type": int, "default": 120, "help": "CPU seconds until SIGXCPU (default %(default)s)"},
}


def main(argv: Sequence[str] | None = None) -> None:
    args = parsed(__doc__, FLAGS, argv)
    require_checkout(args.release, args.checkout)
    resource.setrlimit(resource.RLIMIT_CPU, (args.cpu_limit, args.cpu_limit + 1))
    graph, cluster = OpGraph.load(args.graph), Cluster.load(args.cluster)
    release = RELEASES[args.release]
    release.stand_ins()
    sys.path[:0] = [str(args.checkout / path) for path in release.PATHS]
    logging.disable()
    importlib.import_module(release.MODULE)
    begin = time.perf_counter()
    try:
        placement, priority = release.place(graph, cluster, args.method, args.fused)
    except AssertionError as e:
        print(json.dumps({"status": "unknown", "error": f"an assertion of the release failed: {e}"}))
        sys.exit(1)
    print(json.dumps({"placement": placement, "priority": priority, "seconds": time.perf_counter() - begin}))


if __name__ == "__main__":
    main()
