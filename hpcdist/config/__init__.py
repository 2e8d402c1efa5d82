"""Load, validate and write configs. OmegaConf is used here alone."""
