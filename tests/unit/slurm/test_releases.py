"""All parsers of the outputs of Slurm 22.05, 24.11 and 26.05, recorded on the dev cluster: the same facts from each."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_recordings import FakeCommands, recorded

from hpcdist.config.loading import load_config
from hpcdist.errors import UserMistake
from hpcdist.slurm import client
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.job.submit import estimate_start, why_no_het_jobs
from hpcdist.slurm.output import (
    parse_boot_times,
    parse_node_features,
    parse_partitions,
    parse_records,
    parse_seconds,
    parse_settings,
)

RELEASES = ["22_05", "24_11", "26_05"]
pytestmark = pytest.mark.parametrize("release", RELEASES)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    monkeypatch.setenv("PATH", str(tmp_path))
    return FakeCommands(tmp_path)


def test_partitions_and_their_nodes(release: str) -> None:
    found = parse_partitions(recorded("partition", release=release), recorded("sinfo", release=release))
    assert [(part.name, part.facts["MaxTime"], part.facts["PreemptMode"], part.facts["Default"]) for part in found] == [
        ("main", "1-00:00:00", "REQUEUE", "YES"),
        ("high", "1-00:00:00", "OFF", "NO"),
    ]
    for part in found:
        assert (part.limit("MaxNodes"), part.allowed("Accounts"), part.denied("Qos")) == (None, None, ())
        (group,) = part.nodes
        assert (group.num_nodes, group.cpus, group.memory_mb, group.gpus) == (4, 8, 32768, 2)
        assert (group.names, group.usable) == ("n[1-4]", True)


@pytest.mark.usefixtures("utc")
def test_nodes(release: str) -> None:
    text = recorded("nodes", release=release)
    assert parse_node_features(text) == {"n1": frozenset(), "n2": frozenset()}
    assert list(parse_boot_times(text)) == ["n1", "n2"]
    assert [record["State"] for record in parse_records(text)] == ["IDLE", "IDLE"]


def test_settings(release: str) -> None:
    settings = parse_settings(recorded("config", release=release))
    assert settings["SLURM_VERSION"].startswith(release.replace("_", "."))
    assert (settings["ClusterName"], settings["PreemptMode"]) == ("hpcdist", "REQUEUE")
    assert (parse_seconds(settings["KillWait"]), parse_seconds(settings["UnkillableStepTimeout"])) == (5, 60)
    assert why_no_het_jobs(settings) == ""


@pytest.mark.processes
def test_estimated_start(release: str, commands: FakeCommands) -> None:
    commands.add("sbatch", error=recorded("messages", "test-only", release=release))
    text = estimate_start(load_config("ddp_digits", ["name=a"]))
    assert text.startswith("the job would start at 2026-11-21T23:4")
    assert text.endswith(" using 2 processors on nodes n[1-2] in partition main")
    assert len(text.split()) == 15


@pytest.mark.processes
@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ("test-only-account", "Invalid account or account/partition combination specified"),
        ("test-only-gpus", "Requested node configuration is not available"),
        ("test-only-part", "invalid partition specified: nosuch allocation failure: Invalid partition name specified"),
    ],
)
def test_rejection(release: str, section: str, reason: str, commands: FakeCommands) -> None:
    commands.add("sbatch", error=recorded("messages", section, release=release), code=1)
    with pytest.raises(UserMistake) as error:
        estimate_start(load_config("ddp_digits", ["name=a"]))
    assert str(error.value) == f"Slurm rejects this job: {reason}"


@pytest.mark.processes
def test_second_requeue_and_unknown_job(release: str, commands: FakeCommands) -> None:
    commands.add("scontrol", error=recorded("messages", "requeue-again", release=release), code=1)
    client.requeue_job("1")
    commands.add("scontrol", error="Access/permission denied for job 1\n", code=1)
    with pytest.raises(SlurmError, match="Access/permission denied"):
        client.requeue_job("1")
    commands.add("scontrol", error=recorded("messages", "unknown-job", release=release), code=1)
    assert client.job_records("99999") == []
