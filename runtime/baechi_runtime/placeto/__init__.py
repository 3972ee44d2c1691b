"""Training, comparing and studying the learned placer."""
