"""The run folder, its lease and status, and what is derived from run folders."""
