"""Checkpoints: files with hashes, an asynchronous saver, shards of distributed models, and the export to MLflow."""
