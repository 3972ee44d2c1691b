"""Measured values for every executor: parity, samples of times, the timing loop, links."""
