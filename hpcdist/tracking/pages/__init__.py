"""What MLflow's UI shows of runs and sweeps: parameters and tags, description, prepared views, and links to them."""
