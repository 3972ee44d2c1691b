"""The flags of `baechi export`, and of export-device-map, which is that with its format chosen."""

import argparse

from runtime.exports import DEFAULT, FORMATS
from runtime.flags import common as flags


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of the sub-command."""
    flags.add_choice(parser, "--format", {name: (text,) for name, (_, text) in FORMATS.items()}, DEFAULT)
    add_device_map_flags(parser)


def add_device_map_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(format=DEFAULT)
    parser.add_argument("graph", metavar="GRAPH", help="a graph file whose ops know their modules: one that `baechi train --out` wrote")
    parser.add_argument("plan", metavar="PLAN", help="a plan file of this graph")
    flags.add_output_flags(parser, out="write the result to this file")
