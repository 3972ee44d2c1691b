"""What the sub-commands of `baechi` do with their arguments; runtime.cli lists them."""
