"""Trainer `rl`: proximal policy optimization with one agent and several observers."""
