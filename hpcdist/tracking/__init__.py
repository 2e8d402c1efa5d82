"""From a rank's metrics to MLflow: what ranks write (`journal`, `script_store`), its upload (`shipper`, `delivery`) to
the MLflow run with its `pages` and `artifacts`, and access to MLflow's servers (`mlflow_client`, `uri`).
"""
