"""Jobs of runs: their submission, the supervisor in the batch step, and the steps that run ranks."""
