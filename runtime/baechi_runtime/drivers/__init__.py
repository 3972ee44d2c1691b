"""The commands' main jobs, the same for every framework: the order of the stages is here and nowhere else."""
