"""What is CUDA's alone: what the driver says of the GPUs, graphs, streams, one GPU as several."""
