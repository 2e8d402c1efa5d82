"""Stack traces of hung ranks, collected on every node before the ranks are killed.

`node` runs once on each node, `collect` starts it and saves its results, `summary` finds the ranks that differ.
"""
