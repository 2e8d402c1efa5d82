"""Tests of the container runtimes on Slurm that have passed, by version, and the generator of their table.

A cell of `tests/slurm/test_runtime_matrix.py` is added after it has passed, with the versions and the date of that run.
"""

from __future__ import annotations

from dataclasses import dataclass

from generators.tables import cell, table

#: The columns of the matrix.
FAULTS = (
    "plain",
    "requeue",
    "preemption, 0 s",
    "preemption, 20 s",
    "time limit",
    "`hpcdist stop`",
    "killed rank",
    "killed supervisor",
    "dead node",
)

#: Users who submitted the runs, for `RecordedTests.user`.
ROOT, USER = "root", "an ordinary user"
#: The columns that are run as an ordinary user as well.
_AS_USER = ("plain", "requeue", "killed rank")


@dataclass(frozen=True, kw_only=True)
class RecordedTests:
    """Cells of the matrix that have passed with the same versions."""

    runtime: str  #: as `container.runtime`
    version: str
    passed: tuple[str, ...]  #: of `FAULTS`
    image: str = ""  #: form of the image, for runtimes that have several
    slurm: str = "22.05.8"
    proctrack: str = "linuxproc"
    user: str = ROOT
    date: str = "2026-11-23"


#: The whole matrix passed as root on 2026-11-23, with both plugins that signal and end the processes of a step.
RECORDED = (
    RecordedTests(runtime="podman", version="4.3.1", passed=FAULTS),
    RecordedTests(runtime="podman", version="4.3.1", passed=FAULTS, proctrack="cgroup"),
    RecordedTests(runtime="podman", version="4.3.1", passed=_AS_USER, user=USER),
    RecordedTests(runtime="docker", version="20.10.24", passed=FAULTS),
    RecordedTests(runtime="docker", version="20.10.24", passed=FAULTS, proctrack="cgroup"),
    RecordedTests(runtime="docker", version="20.10.24", passed=_AS_USER, user=USER),
    RecordedTests(runtime="apptainer", image="folder", version="1.4.5", passed=FAULTS),
    RecordedTests(runtime="apptainer", image="folder", version="1.4.5", passed=FAULTS, proctrack="cgroup"),
    RecordedTests(runtime="apptainer", image=".sif", version="1.4.5", passed=FAULTS),
    RecordedTests(runtime="apptainer", image=".sif", version="1.4.5", passed=FAULTS, proctrack="cgroup"),
    RecordedTests(runtime="apptainer", image="folder", version="1.4.5", passed=_AS_USER, user=USER),
    RecordedTests(runtime="apptainer", image=".sif", version="1.4.5", passed=_AS_USER, user=USER),
    RecordedTests(runtime="charliecloud", version="0.31", passed=FAULTS),
    RecordedTests(runtime="charliecloud", version="0.31", passed=FAULTS, proctrack="cgroup"),
    RecordedTests(runtime="charliecloud", version="0.31", passed=_AS_USER, user=USER),
    RecordedTests(runtime="enroot", image="folder", version="4.1.2", passed=FAULTS),
    RecordedTests(runtime="enroot", image="folder", version="4.1.2", passed=FAULTS, proctrack="cgroup"),
    RecordedTests(runtime="enroot", image=".sqsh", version="4.1.2", passed=FAULTS),
    RecordedTests(runtime="enroot", image=".sqsh", version="4.1.2", passed=FAULTS, proctrack="cgroup"),
    RecordedTests(runtime="enroot", image="folder", version="4.1.2", passed=_AS_USER, user=USER),
    RecordedTests(runtime="enroot", image=".sqsh", version="4.1.2", passed=_AS_USER, user=USER),
    RecordedTests(runtime="pyxis", version="0.24", passed=FAULTS),
    RecordedTests(runtime="pyxis", version="0.24", passed=FAULTS, proctrack="cgroup"),
    RecordedTests(runtime="pyxis", version="0.24", passed=_AS_USER, user=USER),
)


def recorded_tests() -> str:
    """Return one row per runtime, version and kind of image, and one column per fault."""
    rows = []
    for one in RECORDED:
        name = f"{one.runtime}, {one.image}" if one.image else one.runtime
        cells = ["passed" if fault in one.passed else "–" for fault in FAULTS]
        rows.append((cell(name), one.version, *cells, one.slurm, one.proctrack, one.user, one.date))
    return table(("runtime", "version", *FAULTS, "Slurm", "proctrack", "user", "date"), rows)
