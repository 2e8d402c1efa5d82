"""The processes of ranks: their start, process group, checkpoints and stopping, and what a trainer sees of them."""
