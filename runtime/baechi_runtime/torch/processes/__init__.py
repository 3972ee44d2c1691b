"""Worker processes, one per device: starting and ending them, and tensors between them."""
