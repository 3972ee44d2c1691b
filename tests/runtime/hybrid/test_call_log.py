"""When calls run, as a process of a group notes it: pieces that share a weight run backward one after another."""

import time
from itertools import pairwise

import torch
from torch import Tensor

from runtime.hybrid.call_log import CallLog, Span

CHUNKS = ("first", "second", "third")


def spans(log: CallLog, phase: str) -> dict[str, Span]:
    return {call: (start, end) for call, p, start, end in log.calls() if p == phase}


def run_pieces(weight: Tensor, log: CallLog | None) -> None:
    """A step of pieces that each have a call, the last backward first."""
    pieces = {name: torch.mm if log is None else log.noting(name, torch.mm) for name in CHUNKS}
    written = [run(torch.ones(4, 8), weight) for run in pieces.values()]
    for value in reversed(written):
        value.sum().backward()


def test_calls_of_pieces_that_share_a_weight_have_times_of_their_own() -> None:
    """To each belongs the adding up of its own gradient, too."""
    weight, log, added = torch.ones(8, 8, requires_grad=True), CallLog(), []
    weight.register_post_accumulate_grad_hook(lambda _: added.append(time.monotonic_ns()))
    for _ in range(2):
        log.begin()
        added.clear()
        run_pieces(weight, log)
        found = spans(log, "backward")
        assert set(spans(log, "forward")) == set(found) == set(CHUNKS)
        ran = [found[name] for name in reversed(CHUNKS)]
        assert all(before[1] < after[0] for before, after in pairwise(ran))
        assert all(start < at < end for (start, end), at in zip(ran, added, strict=True))


def test_a_clean_sheet_is_left_alone_by_later_steps() -> None:
    """Although the leaf in which a weight's gradient is added up is the same one as before."""
    weight, log = torch.ones(8, 8, requires_grad=True), CallLog()
    _held = weight.view(-1)  # and with it the leaf
    run_pieces(weight, log)
    log.begin()
    run_pieces(weight, None)
    assert log.calls() == []
