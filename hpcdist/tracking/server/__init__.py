"""MLflow's UI server for one user (`hpcdist ui`), and the schema of a database."""
