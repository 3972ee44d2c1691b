"""The line through a link's samples."""

import random

import pytest

from baechi_ext.cost import fit_link
from baechi_ext.errors import ProfileError
from baechi_ext.ir import Link

SIZES = [4 * 2**i for i in range(0, 27, 2)]


def test_a_perfect_line_is_found_again() -> None:
    fit = fit_link([(size, 0.0001754 * size + 134) for size in SIZES])
    assert (fit.us_per_byte, fit.latency_us) == pytest.approx((0.0001754, 134))
    assert fit.r_squared == pytest.approx(1)
    assert fit.to_link() == Link(us_per_byte=fit.us_per_byte, latency_us=fit.latency_us)
    assert str(fit) == "0.0001754 us/B x bytes + 134 us (r2 1.000)"


def test_a_noisy_line_is_found_within_its_noise() -> None:
    draw = random.Random(0)
    fit = fit_link([(size, (0.002 * size + 50) * draw.uniform(0.95, 1.05)) for size in SIZES for _ in range(20)])
    assert fit.us_per_byte == pytest.approx(0.002, rel=0.03)
    assert fit.latency_us == pytest.approx(50, rel=0.03)
    assert 0.9 < fit.r_squared < 1


def test_one_slow_large_sample_does_not_rule_the_latency() -> None:
    exact = [(size, 0.001 * size + 20) for size in SIZES]
    fit = fit_link([*exact[:-1], (exact[-1][0], exact[-1][1] * 1.5)])
    assert fit.latency_us == pytest.approx(20, rel=0.25)


def test_the_latency_is_never_negative() -> None:
    fit = fit_link([(10, 5), (100, 95), (1000, 995)])
    assert fit.latency_us == 0
    assert 0.5 < fit.us_per_byte < 1


def test_the_slope_is_never_negative() -> None:
    fit = fit_link([(10, 30), (100, 20), (1000, 10)])
    assert fit.us_per_byte == 0
    assert 10 <= fit.latency_us <= 30


def test_a_constant_is_a_perfect_line() -> None:
    fit = fit_link([(1, 7), (1000, 7)])
    assert (fit.us_per_byte, fit.latency_us, fit.r_squared) == pytest.approx((0, 7, 1))


def test_scales_say_how_far_each_sample_may_be_off() -> None:
    """Differences of long times: a small one is no surer than the others, and must not rule the line."""
    samples = [(10, 100), (20, 1), (1000, 100)]
    assert fit_link(samples).latency_us < 2
    assert fit_link(samples, [1000, 1000, 1000]).latency_us == pytest.approx(50, rel=0.1)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "samples of at least 2 sizes, got 0 samples; probe more sizes"),
        ([(8, 1), (8, 2)], "samples of at least 2 sizes, got 2 samples"),
        ([(8, 1), (16, 0)], "needs positive, finite times"),
        ([(8, 1), (16, float("inf"))], "needs positive, finite times"),
    ],
)
def test_what_cannot_be_fitted(samples: list[tuple[float, float]], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        fit_link(samples)
