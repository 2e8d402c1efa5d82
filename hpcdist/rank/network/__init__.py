"""Connections between the ranks: store, process groups and RPC, and their authentication."""
