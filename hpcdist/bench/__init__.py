"""Benchmark of the communication between ranks: correctness and speed (`trainer: comm`, `hpcdist bench comm`)."""
