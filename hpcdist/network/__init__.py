"""Schedules, bandwidths and judgement of network measurements: shared by preflight, ranks and `hpcdist bench comm`."""
