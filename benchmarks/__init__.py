"""Measured comparisons. Imports the two packages, is imported by nothing, is not installed. Each file prints the table it is named for."""

from baechi_runtime.host.host_memory import use_huge_pages

use_huge_pages()  # as `baechi` does, before torch is imported
