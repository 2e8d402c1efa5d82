"""Holds a rank of a first attempt before it has imported anything, so before it can hear a signal."""

import sys

if "hpcdist.rank.worker" in sys.orig_argv:
    sys.path.insert(0, __file__.rsplit("/", 2)[0])
    import held_import  # noqa: F401  (importing it is what holds)
