"""The clock of time limits."""

import time

import numba

from baechi_ext.place.effort import clock_seconds
from baechi_ext.simulate.jit import compiling_seconds


def test_it_stands_still_while_a_kernel_is_compiled() -> None:
    compiled = compiling_seconds()
    began, began_clock = time.perf_counter(), clock_seconds()
    assert numba.njit(lambda x: 3 * x)(2) == 6
    compiled = compiling_seconds() - compiled
    took, took_clock = time.perf_counter() - began, clock_seconds() - began_clock
    assert compiled > 0
    assert took_clock <= took - compiled + 1e-3
