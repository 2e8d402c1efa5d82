"""Checkpoints: atomic folders, a background writer, shards of several ranks."""
