"""Training on a changing number of ranks: micro-batches that do not depend on it, and the sum of their gradients."""
