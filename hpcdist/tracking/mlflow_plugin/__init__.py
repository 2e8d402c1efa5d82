"""MLflow in the code of a rank: a plugin of MLflow for the scheme `hpcdist://`, which writes to the run folder."""
