"""The loops, a file for each subject."""
