"""Facts, costs and history of a run for its reviewers, read from the run folder."""
