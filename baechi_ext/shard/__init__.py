"""Sharding: how to split every layer of a network over devices, so that the whole takes least (Elango, PaSE, IPDPS 2021)."""
