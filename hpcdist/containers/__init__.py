"""Containers: of ranks on Slurm (spec, runtimes, probe, steps), of a run on this machine (local), and their images."""
