"""The checks of `hpcdist doctor`."""
