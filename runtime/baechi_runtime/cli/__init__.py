"""The command line: flags, commands, and what belongs to them alone."""
