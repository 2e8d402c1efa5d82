"""MLflow's server: for a team with accounts and one database (`hpcdist server`), and for one user (`hpcdist ui`)."""
