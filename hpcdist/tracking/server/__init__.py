"""MLflow's tracking server for a team, as `hpcdist server` starts it: accounts, one database, proxied artifacts."""
