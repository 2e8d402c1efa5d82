"""The files and models of a run in MLflow: artifacts, logged models, registered versions, and the report of the run."""
