"""Devices as threads of one process: running a placed step, accounting its memory, recording it."""
