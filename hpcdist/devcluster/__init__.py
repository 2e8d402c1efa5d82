"""A real Slurm of several virtual nodes on one Linux machine, for tests and for trying a launch out."""
