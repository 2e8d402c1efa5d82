"""Inside a job: the supervisor in its batch step, the steps that run ranks, and what Slurm says of the job."""
