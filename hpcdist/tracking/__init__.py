"""From a rank's metrics to MLflow: journal, upload, pages and artifacts of a run, and access to MLflow's servers."""
