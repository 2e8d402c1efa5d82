"""A real Slurm with several virtual nodes on one Linux machine, for tests."""
