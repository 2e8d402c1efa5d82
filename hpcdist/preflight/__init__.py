"""Checks of nodes and their network before a run starts."""
