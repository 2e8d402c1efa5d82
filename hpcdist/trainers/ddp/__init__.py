"""Trainer `ddp`: image classification with DistributedDataParallel."""
