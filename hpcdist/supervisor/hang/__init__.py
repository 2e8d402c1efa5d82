"""Where the ranks of a run stand that makes no progress: collected on every node before they are killed.

`node` runs once on each node, `collect` starts it and writes down what came back, `summary` finds the odd one out.
"""
