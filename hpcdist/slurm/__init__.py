"""Slurm: its commands and their output, and jobs with their supervisor and preflight (`job`)."""
