"""`hpcdist doctor`: checks of this machine, of a run, and of its nodes."""
