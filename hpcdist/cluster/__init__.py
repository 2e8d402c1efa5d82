"""Where am I: Slurm's node lists, and this rank's place among all ranks. Standard library only."""
