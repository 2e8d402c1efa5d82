"""Checks of the nodes of a job before its ranks start, run on every node."""
