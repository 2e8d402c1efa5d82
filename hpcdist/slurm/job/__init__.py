"""Inside a job: the supervisor in the batch step, and the steps that run ranks."""
