"""PyTorch's implementation of baechi_runtime.drivers.backend."""
