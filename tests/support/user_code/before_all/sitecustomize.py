"""Holds the ranks of the first attempt before all imports, when they have no signal handlers."""

import sys

if "hpcdist.rank.worker" in sys.orig_argv:
    sys.path.insert(0, __file__.rsplit("/", 2)[0])
    import held_import  # noqa: F401  (the import holds the rank)
