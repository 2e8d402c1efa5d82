"""Trainer `comm`: checks and measures the communication between ranks (`hpcdist bench comm`)."""
