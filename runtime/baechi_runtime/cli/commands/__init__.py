"""Carries out the sub-commands of `baechi`, given their arguments; baechi_runtime.cli.main lists them."""
