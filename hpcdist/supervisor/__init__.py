"""Supervise a run: start the ranks, watch them, decide on restarts. Never imports torch."""
