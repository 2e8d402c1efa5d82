"""Looking at machines before they are trained on: facts, the network between them, and what is wrong (stdlib only)."""
