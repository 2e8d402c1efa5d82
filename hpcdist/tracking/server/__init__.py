"""MLflow's UI server for one user (`hpcdist ui`)."""
