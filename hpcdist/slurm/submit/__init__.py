"""Before the queue: what is asked of Slurm, checked against what it has, written as a batch script, submitted."""
