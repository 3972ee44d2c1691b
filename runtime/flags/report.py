"""The arguments of `baechi report` and `baechi plot`."""

import argparse

_FOLDER = "a folder with graph.json and plan.json, or with a shard plan, such as `baechi train --out=DIR` writes"


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """`folder` and `out`."""
    parser.add_argument("folder", metavar="DIR", help=_FOLDER)
    parser.add_argument("--out", metavar="FILE", help="write the page to this file (default: report.html in DIR)")


def add_plot_flags(parser: argparse.ArgumentParser) -> None:
    """The same; `out` is a folder."""
    parser.add_argument("folder", metavar="DIR", help=_FOLDER)
    parser.add_argument("--out", metavar="FOLDER", help="write the plots to this folder, made if need be (default: DIR)")
