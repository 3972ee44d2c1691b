"""Training loops that change, step by step, what a capture could take for constant; run plainly and captured, and compared."""
