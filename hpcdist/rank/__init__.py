"""The processes of ranks: their start, process group, checkpoints and stopping, and the API for trainers."""
