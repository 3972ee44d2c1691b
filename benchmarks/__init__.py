"""Measured comparisons. Imports the two packages, is imported by nothing, is not installed. Each file prints the table it is named for."""
