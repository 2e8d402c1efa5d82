"""Inside one rank: the process group, checkpoints, stopping, and what a trainer sees of them."""
