"""Slurm: its commands and their output, and the nodes of ranks and roles."""
