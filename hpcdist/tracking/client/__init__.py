"""Access to MLflow: the tracking URI, credentials, client, errors of servers, and the MLflow run of a run folder."""
