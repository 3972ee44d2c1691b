"""A link probe whose times fit no line is taken again, and then said and not used."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from msgspec import UNSET

from baechi_ext.cost import fit_link
from baechi_ext.ir import Link
from baechi_runtime.drivers import link_report
from baechi_runtime.measure import link_probe
from baechi_runtime.measure.link_probe import PROBE_BYTES, LinkProbe, sound
from baechi_runtime.report.report import ProbedLink


def probe_of(times_us: Callable[[int], float]) -> LinkProbe:
    samples = {size: (times_us(size),) for size in PROBE_BYTES}
    return LinkProbe(samples, fit_link([(size, us) for size, (us,) in samples.items()]))


GOOD = probe_of(lambda size: 40 + 8e-5 * size)
RANDOM = np.random.default_rng(3)
NOISE = probe_of(lambda _: float(RANDOM.uniform(50, 5000)))
TOO_FAST = probe_of(lambda size: 0.001 + size / 575e3)
CONSTANT = probe_of(lambda _: 70.0)
BAD = [NOISE, TOO_FAST, CONSTANT]


def taken(probes: Sequence[LinkProbe], *, copies: bool = True) -> tuple[LinkProbe, int]:
    left = iter(probes)
    found = sound(lambda: next(left), copies=copies)
    return found, len(probes) - len(list(left))


def test_a_good_probe_is_used_as_it_is() -> None:
    assert taken([GOOD, GOOD]) == (GOOD, 1)


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_one_is_taken_again(bad: LinkProbe) -> None:
    assert taken([bad, GOOD]) == (GOOD, 2)


@pytest.mark.parametrize("bad", BAD)
def test_two_bad_ones_are_said_and_not_used(bad: LinkProbe) -> None:
    found, probes = taken([bad, bad])
    assert probes == 2
    assert "fit no line" in str(found) and "--comm_cost_coeffs" in str(found)
    link = found.to_link()
    assert link.latency_us == min(us for samples in bad.samples_us.values() for us in samples)
    assert 1e-5 < link.us_per_byte < 1e-1  # two copies, between 200 GB/s and 20 MB/s
    assert "of 2 copies in memory" in found.doubt
    assert link.send_us == link.receive_us == 0
    assert ProbedLink.of(found).doubt == found.doubt != "" and ProbedLink.of(GOOD).doubt is UNSET


def test_a_link_through_shared_memory_takes_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "_copied_us_per_byte", lambda: 3e-5)
    found, _ = taken([replace(CONSTANT, copies=1)] * 2)
    assert found.to_link().us_per_byte == 3e-5
    assert "of a copy in memory" in found.doubt
    assert taken([CONSTANT] * 2)[0].to_link().us_per_byte == 6e-5


def test_what_a_transfer_takes_the_host_is_a_cost_of_its_link() -> None:
    hosted = replace(GOOD, issue_us=30.0)
    assert hosted.to_link() == replace(GOOD.to_link(), issue_us=30.0)
    assert str(hosted) == f"{GOOD}, and 30 us of the host"
    assert (ProbedLink.of(hosted).issue_us, ProbedLink.of(GOOD).issue_us) == (30.0, UNSET)
    assert taken([BAD[0], replace(BAD[1], issue_us=30.0)])[0].to_link().issue_us == 30.0


class TestWhatDevicesSpend:
    """Microseconds per tensor and per byte that a transfer takes from its sender and its receiver."""

    LIKELY = replace(GOOD, send=fit_link([(4, 10.0), (2**20, 80.0)]), receive=fit_link([(4, 0.1), (2**20, 60.0)]))
    UNLIKELY = replace(GOOD, send=LIKELY.send, receive=fit_link([(4, 185.0), (2**20, 185.0)]))

    def test_it_is_charged_to_them(self) -> None:
        assert taken([self.LIKELY, GOOD]) == (self.LIKELY, 1)

    @pytest.mark.parametrize("second", [LIKELY, GOOD])
    def test_more_than_a_transfer_takes_is_probed_again(self, second: LinkProbe) -> None:
        assert taken([self.UNLIKELY, second]) == (second, 2)
        assert taken([second, self.UNLIKELY]) == (second, 1)

    @pytest.mark.parametrize("other", [UNLIKELY, *BAD])
    def test_twice_it_is_said_and_not_used(self, other: LinkProbe) -> None:
        for probes in ([self.UNLIKELY, other], [other, self.UNLIKELY]):
            found, number = taken(probes)
            assert number == 2
            assert "counted as none" in str(found) and "--comm_cost_coeffs" in str(found)
            assert found.to_link() == GOOD.to_link()


def test_of_small_tensors_alone_the_size_tells_nothing() -> None:
    small = LinkProbe(dict.fromkeys((4, 64, 4096), (70.0,)), fit_link([(size, 70.0) for size in (4, 64, 4096)]))
    assert taken([small, GOOD]) == (small, 1)


@pytest.mark.parametrize("bad", BAD)
def test_what_is_handed_over_by_reference_takes_no_time_by_size(bad: LinkProbe) -> None:
    found, probed = taken([bad, GOOD], copies=False)
    latency = statistics.median(us for _, us in bad.medians())
    assert probed == 1
    assert (found.fit.us_per_byte, found.to_link()) == (0, Link(latency_us=latency))
    assert found.samples_us == bad.samples_us
    assert str(found) == f"{latency:.4g} us, whatever the size: tensors are handed over, not copied"


def test_the_largest_tensors_fit_where_memory_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a control group, for one: the machine may have more that is free."""
    monkeypatch.setattr(link_report, "available_bytes", lambda: 2**30)
    assert link_report.sizes_bytes(40, 2)[-1] == 2**27  # six of them are less than 1 GiB
    assert link_report.sizes_bytes(3, 2) == (4, 8, 16, 32)
