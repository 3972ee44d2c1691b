"""CUDA devices of one process: one host thread gives all of them their work, in the order of the plan."""
