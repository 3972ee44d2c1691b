"""The arguments of `baechi trace`."""

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    """`folder`, `out` and `ranks`."""
    parser.add_argument("folder", metavar="DIR", help="a folder with graph.json and plan.json, such as `baechi train --out=DIR` writes")
    where = "write the trace to this file, compressed if it ends in .gz (default: trace.json in DIR)"
    parser.add_argument("--out", metavar="FILE", help=where)
    ranks = "also write a trace of each device by itself into this folder, as torch's HTA reads ranks"
    parser.add_argument("--ranks", metavar="FOLDER", help=ranks)
