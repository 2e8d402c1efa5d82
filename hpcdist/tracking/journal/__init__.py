"""The journal: metrics and events that ranks write, and the points of it that MLflow gets next, within its budgets."""
