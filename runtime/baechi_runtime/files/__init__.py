"""The files and folders that runs leave behind: how they are written, and what is checked when they are read."""
