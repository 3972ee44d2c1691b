"""The flags of `baechi place`."""

import argparse

from runtime.flags import common as flags
from runtime.flags import config as config_flags


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them."""
    parser.add_argument("graph", metavar="GRAPH", help="a graph file; see docs/files.md")
    flags.add_placing_flags(parser)
    flags.add_cluster_flags(parser)
    config_flags.add_flag(parser)
    flags.add_output_flags(parser, out="write the plan to this file")
