"""Ranks in containers under Slurm: which container, its command line, and that none outlives its job."""
