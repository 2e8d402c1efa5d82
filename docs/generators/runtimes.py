"""Generator of the table of container runtimes and the tests on Slurm that they have passed."""

from __future__ import annotations

from generators.tables import cell, table
from hpcdist.containers.recorded_tests import FAULTS, RECORDED


def recorded_tests() -> str:
    """Return one row per runtime, version and kind of image, and one column per fault."""
    rows = []
    for one in RECORDED:
        name = f"{one.runtime}, {one.image}" if one.image else one.runtime
        cells = ["passed" if fault in one.passed else "–" for fault in FAULTS]
        rows.append((cell(name), one.version, *cells, one.slurm, one.proctrack, one.user, one.date))
    return table(("runtime", "version", *FAULTS, "Slurm", "proctrack", "user", "date"), rows)
