"""Loading, validation and storage of configs. No other package uses OmegaConf."""
