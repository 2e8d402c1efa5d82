"""Tests of the container runtimes on Slurm that have passed, and the generator of their table.

A cell of `tests/slurm/test_runtime_matrix.py` is added after it has passed, with the versions of that run.
"""

from __future__ import annotations

from generators.tables import cell, table

#: The columns of the matrix: each runtime with each form of its images.
APPTAINER_FOLDER, APPTAINER_SIF = "apptainer 1.4.5, folder", "apptainer 1.4.5, .sif"
ENROOT_FOLDER, ENROOT_SQSH = "enroot 4.1.2, folder", "enroot 4.1.2, .sqsh"
PYXIS = "pyxis 0.24"
COLUMNS = (APPTAINER_FOLDER, APPTAINER_SIF, ENROOT_FOLDER, ENROOT_SQSH, PYXIS)
#: One form of image of each runtime.
_ONE_FORM = (APPTAINER_SIF, ENROOT_SQSH, PYXIS)

#: The rows that have passed, with the columns of each.
PASSED: dict[str, tuple[str, ...]] = {
    "requeue, an ordinary user": COLUMNS,
    "signal of the time limit": _ONE_FORM,
    "killed rank": _ONE_FORM,
    "killed supervisor": (PYXIS,),
    "dead node": (PYXIS,),
}


def recorded_tests() -> str:
    """Return one row per fault and user, and one column per runtime and form of image."""
    rows = []
    for fault, columns in PASSED.items():
        cells = ["passed" if column in columns else "–" for column in COLUMNS]
        rows.append((fault, *cells))
    return table(("fault", *map(cell, COLUMNS)), rows)
