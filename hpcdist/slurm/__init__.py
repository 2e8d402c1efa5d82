"""Slurm: its commands and their output, job submission (`submit`) and the supervisor inside a job (`job`)."""
