"""Devices that are servers or logical devices, and the sessions that run placed steps on them."""
