"""A run with secrets through a real Slurm: its ranks get them, and nothing that others can read holds them."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hpcdist_runs import HOLD_OVERRIDES
from mlflow_server import Server
from slurm_cluster import DevCluster
from slurm_runs import NUM_RANKS, ON_FOUR_RANKS, SlurmRuns

from hpcdist.devcluster.processes import node_members
from hpcdist.files.atomic import read_json

SECRETS = {"MY_A": "cluster-s3cret-value", "MY_B": "launch-s3cret-value", "MY_C": "params-s3cret-value"}
PASSWORD = "uri-s3cret-value"


@pytest.fixture(autouse=True)
def no_jobs_left(devcluster: DevCluster) -> Iterator[None]:
    yield
    devcluster.cancel_all()


def processes() -> dict[int, tuple[str, str]]:
    """Command line and environment of every process that this test can see."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                found[int(folder.name)] = (folder / "cmdline").read_text(), (folder / "environ").read_text()
            except (OSError, UnicodeDecodeError):
                continue
    return found


@pytest.mark.faults  # for the time that a server takes to start
@pytest.mark.timeout(500)
def test_secrets_reach_the_ranks_and_nobody_else(slurm_runs: SlurmRuns, devcluster: DevCluster, tmp_path: Path) -> None:
    name = "secretive"
    server = Server(tmp_path)
    server.start()
    uri = server.uri.replace("http://", f"http://ada:{PASSWORD}@")
    arguments = [
        *slurm_runs.config(name, *ON_FOUR_RANKS, *HOLD_OVERRIDES),
        "--cluster",
        "devcluster",
        # Nothing of the submitting shell comes along, so the job has what the run folder says.
        "cluster.sbatch.export=NONE",
        "cluster.env.WANDB_API_KEY=${oc.env:MY_A}",
        "launch.env.OTHER_TOKEN=${oc.env:MY_B}",
        "params.hub_token=${oc.env:MY_C}",
        "tracking.uri=${oc.env:MY_URI}",
        # The nodes do not reach the server, which listens on loopback.
        "tracking.drain_timeout_s=5",
    ]
    env = {**SECRETS, "MY_URI": uri}
    texts = {}
    try:
        code, texts["dry run"] = slurm_runs.command("submit", *arguments, "--dry-run", **env)
        assert code == 0, texts["dry run"]
        assert "# WANDB_API_KEY is set by the supervisor" in texts["dry run"]
        code, texts["submit"] = slurm_runs.command("submit", *arguments, **env)
        assert code == 0, texts["submit"]
        run = slurm_runs.run_dir(name)
        job = str((read_json(run.path / "slurm.json") or {})["job_id"])
        slurm_runs.wait_until_held(name, NUM_RANKS)
        assert run.secrets.stat().st_mode & 0o777 == 0o600
        assert run.path.stat().st_mode & 0o077 == 0

        texts["show job"] = devcluster.run("scontrol", "show", "job", "-dd", job)
        texts["batch script"] = devcluster.run("scontrol", "write", "batch_script", job, "-")
        assert "supervise" in texts["batch script"]
        texts["steps"] = devcluster.run("scontrol", "show", "step")
        seen = processes()
        texts["ps"] = "\n".join(command for command, _ in seen.values()) + subprocess.check_output(
            ["ps", "axww"], text=True
        )
        on_nodes = {pid for pids in node_members(devcluster.layout, devcluster.settings).values() for pid in pids}
        ranks = [found for pid, found in seen.items() if pid in on_nodes and "hpcdist.rank.worker" in found[0]]
        workers = [environ for command, environ in ranks if "srun" not in command.split("\0")[0]]
        assert len(workers) >= NUM_RANKS
        for environ in workers[-NUM_RANKS:]:
            assert "WANDB_API_KEY=cluster-s3cret-value\0" in environ
            assert "OTHER_TOKEN=launch-s3cret-value\0" in environ
            assert "HPCDIST_PARAMS_HUB_TOKEN=params-s3cret-value\0" in environ

        slurm_runs.release(name)
        state = slurm_runs.wait_end(name, job)
        assert state.status == "finished", f"{state}\n{slurm_runs.job_log(name)}"
        assert not run.secrets.exists()
        texts["slurmctld"] = (devcluster.layout.logs / "slurmctld.log").read_text(errors="replace")
        for path in run.path.rglob("*"):
            if path.is_file():
                texts[str(path)] = path.read_text(errors="replace")
        # The database's write-ahead log is beside it.
        code, texts["sync"] = slurm_runs.command("sync", name, HPCDIST_TRACKING_URI=uri)
        assert code == 0, texts["sync"]
        assert tracked(tmp_path)
        for path in tmp_path.rglob("*"):
            if path.is_file():
                texts[str(path)] = path.read_text(errors="replace")
    finally:
        server.kill()
    assert {where for where, text in texts.items() if "s3cret" in text} == set()


def tracked(folder: Path) -> bool:
    with sqlite3.connect(folder / "mlflow.db") as database:
        found = database.execute("select value from params where key = 'params.hub_token'").fetchall()
    return bool(found == [("***",)])
