"""Trainer `hybrid`: DistributedDataParallel with embedding tables on parameter servers."""
