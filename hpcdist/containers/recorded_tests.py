"""Tests of the container runtimes on Slurm that have passed, by version; the authority for doctor and documentation.

A cell of `tests/slurm/test_runtime_matrix.py` or `tests/slurm/test_runtimes_as_user.py` is added after it has passed,
with the versions and the date of that run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
#: The columns that `tests/slurm/test_runtimes_as_user.py` runs.
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


def tested_versions(runtime: str) -> list[str]:
    """Return the versions of a runtime that have passed tests on Slurm."""
    return list(dict.fromkeys(found.version for found in RECORDED if found.runtime == runtime))


def tests_of(runtime: str, version: str) -> Iterator[RecordedTests]:
    """Yield the recorded tests of a runtime in the same release as `version`, such as 4.3 for 4.3.1."""
    release = version.split(".")[:2]
    yield from (one for one in RECORDED if one.runtime == runtime and one.version.split(".")[:2] == release)
