"""From a rank's metrics to MLflow: what ranks write (`journal`, `mlflow_plugin`), its upload (`shipping`) to the MLflow
run with its `pages` and `artifacts`, and access to MLflow's servers (`client`, `server`).
"""
