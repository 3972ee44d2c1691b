"""The flags of the commands, and the requests they become. Reading them loads no framework."""
