"""From a rank's metrics to MLflow: the journal that ranks write, and the process that ships it."""
