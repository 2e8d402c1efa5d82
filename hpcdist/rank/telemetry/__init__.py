"""Measurements of one rank and its node: heartbeat, step times, system metrics, flight recorder, NCCL log."""
