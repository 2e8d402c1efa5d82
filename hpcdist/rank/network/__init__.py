"""Connections between the ranks: store, process groups and RPC, and the checks of who may use them."""
