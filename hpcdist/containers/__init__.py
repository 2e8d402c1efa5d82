"""Containers of runs: specification, runtimes, and the processes that tie them to Slurm."""
