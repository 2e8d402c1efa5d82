"""A run with secrets on a real Slurm: its ranks receive them, and no output, file or process list contains them."""

from __future__ import annotations

import sqlite3
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hpcdist_runs import HOLD_OVERRIDES
from mlflow_server import Server
from slurm_cluster import DevCluster
from slurm_runs import NUM_RANKS, ON_FOUR_RANKS, SlurmRuns

from hpcdist.devcluster.host import node_members

NAME = "secretive"
SECRETS = {"MY_A": "cluster-s3cret-value", "MY_B": "launch-s3cret-value", "MY_C": "params-s3cret-value"}
PASSWORD = "uri-s3cret-value"
OVERRIDES = (
    *ON_FOUR_RANKS,
    *HOLD_OVERRIDES,
    # The job does not get the environment of the submitting shell, only the variables of the run folder.
    "cluster.sbatch.export=NONE",
    "cluster.env.WANDB_API_KEY=${oc.env:MY_A}",
    "launch.env.OTHER_TOKEN=${oc.env:MY_B}",
    "params.hub_token=${oc.env:MY_C}",
    "tracking.uri=${oc.env:MY_URI}",
    # The server listens on loopback, which the nodes cannot reach.
    "tracking.drain_timeout_s=5",
)

pytestmark = pytest.mark.faults


@dataclass
class SecretRun:
    """A finished run with secrets."""

    texts: dict[str, str] = field(default_factory=dict)
    """Outputs of commands and contents of files, by name."""
    rank_environments: list[str] = field(default_factory=list)
    modes: dict[str, int] = field(default_factory=dict)
    """File permissions while the ranks ran."""
    is_secrets_file_removed: bool = False
    tracked_params: list[tuple[str]] = field(default_factory=list)


def processes() -> dict[int, tuple[str, str]]:
    """Return command line and environment of every process, by process id."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                found[int(folder.name)] = (folder / "cmdline").read_text(), (folder / "environ").read_text()
            except (OSError, UnicodeDecodeError):
                continue
    return found


def files(folder: Path) -> dict[str, str]:
    """Return the contents of all files below a folder."""
    return {str(path): path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()}


def slurm_output(devcluster: DevCluster, job: str) -> dict[str, str]:
    """Return the output of the commands that show jobs, steps and processes to other users."""
    return {
        "show job": devcluster.run("scontrol", "show", "job", "-dd", job),
        "batch script": devcluster.run("scontrol", "write", "batch_script", job, "-"),
        "steps": devcluster.run("scontrol", "show", "step"),
        "ps": subprocess.check_output(["ps", "axww"], text=True),
        "command lines": "\n".join(command for command, _ in processes().values()),
    }


def rank_environments(devcluster: DevCluster) -> list[str]:
    on_nodes = {pid for pids in node_members(devcluster.layout, devcluster.settings).values() for pid in pids}
    ranks = [found for pid, found in processes().items() if pid in on_nodes and "hpcdist.rank.worker" in found[0]]
    return [environ for command, environ in ranks if "srun" not in command.split("\0")[0]]


@pytest.fixture(scope="module")
def secret_run(slurm_runs: SlurmRuns, devcluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> SecretRun:
    result = SecretRun()
    database = tmp_path_factory.mktemp("secret_run")
    server = Server(database)
    server.start()
    uri = server.uri.replace("http://", f"http://ada:{PASSWORD}@")
    arguments = [*slurm_runs.config(NAME, *OVERRIDES), "--cluster", "devcluster"]
    env = {**SECRETS, "MY_URI": uri}
    try:
        for title, option in (("dry run", ["--dry-run"]), ("submit", [])):
            code, result.texts[title] = slurm_runs.command("submit", *arguments, *option, **env)
            assert code == 0, result.texts[title]
        run, job = slurm_runs.run_dir(NAME), slurm_runs.job_id(NAME)
        slurm_runs.wait_until_held(NAME, NUM_RANKS)
        result.modes = {path.name: path.stat().st_mode & 0o777 for path in (run.secrets, run.path)}
        result.texts |= slurm_output(devcluster, job)
        result.rank_environments = rank_environments(devcluster)

        slurm_runs.release(NAME)
        state = slurm_runs.wait_end(NAME, job)
        assert state.status == "finished", f"{state}\n{slurm_runs.job_log(NAME)}"
        result.is_secrets_file_removed = not run.secrets.exists()
        result.texts["slurmctld"] = (devcluster.layout.logs / "slurmctld.log").read_text(errors="replace")
        result.texts |= files(run.path)
        code, result.texts["sync"] = slurm_runs.command("sync", NAME, HPCDIST_TRACKING_URI=uri)
        assert code == 0, result.texts["sync"]
        with sqlite3.connect(database / "mlflow.db") as connection:
            query = "select value from params where key = 'params.hub_token'"
            result.tracked_params = connection.execute(query).fetchall()
        result.texts |= files(database)  # while the server runs: the database's write-ahead log is a separate file
    finally:
        server.kill()
    return result


def test_ranks_receive_the_secrets_as_environment_variables(secret_run: SecretRun) -> None:
    assert len(secret_run.rank_environments) >= NUM_RANKS
    for environ in secret_run.rank_environments[-NUM_RANKS:]:
        assert "WANDB_API_KEY=cluster-s3cret-value\0" in environ
        assert "OTHER_TOKEN=launch-s3cret-value\0" in environ
        assert "HPCDIST_PARAMS_HUB_TOKEN=params-s3cret-value\0" in environ


def test_secrets_file_is_private_and_removed_at_the_end_of_the_run(secret_run: SecretRun) -> None:
    assert secret_run.modes["secrets.json"] == 0o600
    assert secret_run.modes[NAME] & 0o077 == 0
    assert secret_run.is_secrets_file_removed


def test_no_output_file_or_command_line_contains_a_secret(secret_run: SecretRun) -> None:
    assert "# The supervisor sets WANDB_API_KEY from secrets.json" in secret_run.texts["dry run"]
    assert "supervise" in secret_run.texts["batch script"]
    assert secret_run.tracked_params == [("***",)]
    assert {name for name, text in secret_run.texts.items() if "s3cret" in text} == set()
