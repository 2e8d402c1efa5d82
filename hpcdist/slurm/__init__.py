"""Slurm: its commands and their output, jobs and their supervisor (`job`), and checks of nodes (`preflight`)."""
