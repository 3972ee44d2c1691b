"""A plan made runnable by PyTorch: devices, programs and their ops, CUDA graphs, what goes from device to device."""
