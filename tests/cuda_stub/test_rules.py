"""The pretended devices keep the rules of CUDA, and show what breaks them: what is not ordered, not kept, or not allowed in a capture."""

from collections.abc import Callable

import pytest
import torch

from tests.cuda_stub import kernels

SEEDS = range(8)


def test_there_are_four_devices_with_memory_of_their_own() -> None:
    assert torch.cuda.device_count() == 4
    free, total = torch.cuda.mem_get_info(3)
    kept = torch.empty(2**30, dtype=torch.uint8, device="cuda:3")
    assert torch.cuda.mem_get_info(3) == (free - 2**30, total)
    assert torch.cuda.mem_get_info(2)[0] >= free - 2**28
    with pytest.raises(torch.OutOfMemoryError, match=r"GPU 3 has a total capacity of 80.00 GiB"):
        torch.empty(total, dtype=torch.uint8, device=kept.device)


def after_each_other(*, ordered: bool) -> bool:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        a = torch.full((4,), 2.0, device="cuda")
    if ordered:
        second.wait_stream(first)
    with torch.cuda.stream(second):
        b = a + 1
    torch.cuda.synchronize()
    return b.tolist() == [3.0] * 4


def used_again(*, ordered: bool) -> bool:
    """A tensor that another stream reads yet is freed, and its memory filled anew."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        a = torch.full((1024,), 2.0, device="cuda")
    second.wait_stream(first)
    with torch.cuda.stream(second):
        b = a + 1
    if ordered:
        a.record_stream(second)
    del a
    with torch.cuda.stream(first):
        torch.full((1024,), 5.0, device="cuda")
    torch.cuda.synchronize()
    return b.tolist() == [3.0] * 1024


def between_devices(*, ordered: bool) -> bool:
    stream, other = torch.cuda.Stream(0), torch.cuda.Stream(1)
    with torch.cuda.stream(stream):
        a = torch.full((4,), 2.0, device="cuda:0")
        done = torch.cuda.Event()
        done.record(stream)
    with torch.cuda.stream(other), torch.cuda.stream(torch.cuda.Stream(0)):
        if ordered:
            torch.cuda.current_stream(0).wait_event(done)
        b = torch.empty(4, device="cuda:1").copy_(a, non_blocking=True)
    torch.cuda.synchronize(1)
    return b.tolist() == [2.0] * 4


@pytest.mark.parametrize("case", [after_each_other, used_again, between_devices])
def test_what_is_not_ordered_goes_wrong_for_some_order(case: Callable[..., bool]) -> None:
    right = {ordered: [] for ordered in (False, True)}
    for seed in SEEDS:
        kernels.order(seed)
        for ordered, found in right.items():
            found.append(case(ordered=ordered))
    assert all(right[True])
    assert not all(right[False])


def reads_a_value(x: torch.Tensor, stream: torch.cuda.Stream) -> None:
    x.sum().item()


def waits_for_the_device(x: torch.Tensor, stream: torch.cuda.Stream) -> None:
    torch.cuda.synchronize()


def waits_for_what_is_not_captured(x: torch.Tensor, stream: torch.cuda.Stream) -> None:
    stream.wait_event(torch.cuda.Stream().record_event())


def leaves_a_stream_behind(x: torch.Tensor, stream: torch.cuda.Stream) -> None:
    other = torch.cuda.Stream()
    other.wait_stream(stream)
    with torch.cuda.stream(other):
        x + 1


@pytest.mark.parametrize("work", [reads_a_value, waits_for_the_device, waits_for_what_is_not_captured, leaves_a_stream_behind])
def test_what_no_graph_may_hold_ends_the_capture(work: Callable[[torch.Tensor, torch.cuda.Stream], None]) -> None:
    x, stream = torch.ones(4, device="cuda"), torch.cuda.Stream()
    with pytest.raises(RuntimeError, match=r"previous error during capture|unjoined|uncaptured|is capturing"):  # noqa: SIM117
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            work(x, stream)
    assert (x + 1).tolist() == [2.0] * 4


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_graph_computes_when_it_is_replayed(seed: int | None) -> None:
    kernels.order(seed)
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2 + 1
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [2 * value + 1] * 3


def test_a_kernel_that_fails_is_the_error_of_who_waits(capfd: pytest.CaptureFixture[str]) -> None:
    kernels.order(1)
    torch.nn.functional.embedding(torch.tensor([7], device="cuda"), torch.ones(3, 2, device="cuda"))
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        torch.cuda.synchronize()
    assert "index out of range" in capfd.readouterr().err


def test_a_kernel_that_nobody_computes_is_an_error_that_names_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert kernels.runtime.cuda_stub_library_launch(b"cublasSgemm_v2", None) == 1
    with pytest.raises(RuntimeError, match="the stub's kernels do not compute"):
        torch.cuda.check_error(kernels.runtime.cudaGetLastError())
    assert capfd.readouterr().err == "cuda stub: nobody computes cublasSgemm_v2\n"
