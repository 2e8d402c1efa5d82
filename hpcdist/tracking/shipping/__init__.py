"""The shipper: the process that uploads a run to MLflow in passes while it runs, and `sync`, which uploads the rest."""
