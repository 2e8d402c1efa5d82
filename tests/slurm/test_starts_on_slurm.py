"""Ranks in a Python environment of their own, and parents of ranks, on a real Slurm."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import HOLD_OVERRIDES, wait_for
from http_servers import Server
from slurm_cluster import WAIT_S, DevCluster
from slurm_faults import FaultScene
from slurm_runs import NUM_RANKS, ON_FOUR_RANKS, SlurmRuns

from hpcdist.environments.modules import has_modules
from hpcdist.host.json_files import read_json
from hpcdist.rank.processes import PARENT_MODULE

#: The definition of `module` of a site: it changes the shell's environment.
MODULES = """
module() {
  [ "$2" = python/tests ] || { echo "ERROR: Unable to locate a modulefile for '$2'" >&2; return 1; }
  export LOADEDMODULES="$2" PATH="%s/bin:$PATH"
}
"""


def packages_path() -> str:
    """Return the content of a `.pth` file with the packages of these tests."""
    return "\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n"


def make_venv(folder: Path) -> Path:
    """Create a virtual environment that finds its packages in the environment of the tests."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "tests.pth").write_text(packages_path())
    return venv


@pytest.mark.faults
@pytest.mark.skipif(shutil.which("mksquashfs") is None, reason="needs squashfs-tools")
def test_requeued_run_unpacks_its_environment_again(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str, tmp_path: Path
) -> None:
    """The commands of docs/how-to/environments.md; the virtual nodes share a disk, so one of them unpacks."""
    name = "squashed"
    squashed, disk = tmp_path / "env.sqsh", tmp_path / "disk"
    subprocess.run(["mksquashfs", make_venv(tmp_path), squashed, "-quiet"], stdout=subprocess.DEVNULL, check=True)
    disk.mkdir()
    commands = [
        f"sbcast --force {squashed} {disk}/env.sqsh",
        f"srun --nodes=1 --ntasks=1 sh -c 'rm -rf $0/env && unsquashfs -quiet -dest $0/env $0/env.sqsh' {disk}",
    ]
    settings = [f"cluster.setup={json.dumps(commands)}", "cluster.environment.kind=venv"]
    job = slurm_runs.submit_held(name, *settings, f"cluster.environment.path={disk}/env")
    assert_ranks_use(f"{disk}/env/bin/python3", slurm_runs, name)
    devcluster.run("scontrol", "requeue", job)
    slurm_runs.release(name)
    slurm_runs.wait_queued_again(name)
    slurm_runs.start_now(job)
    slurm_runs.assert_finished_as(name, job, slurm_control)
    record = read_json(slurm_runs.run_dir(name).rank_environment) or {}
    assert (record["kind"], record["path"]) == ("venv", f"{disk}/env")


@pytest.mark.faults
@pytest.mark.parametrize("installed", [False, True], ids=["function", "installed"])
def test_ranks_use_the_python_of_a_module(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str, installed: bool, tmp_path: Path
) -> None:
    name = f"module-{installed}".lower()
    venv = make_venv(tmp_path)
    if installed:
        if not has_modules(os.environ):
            pytest.skip("needs environment modules: apt-get install environment-modules, or lmod")
        (tmp_path / "python").mkdir()
        (tmp_path / "python" / "tests").write_text(f"#%Module1.0\nprepend-path PATH {venv}/bin\n")
        variable = f"cluster.env.MODULEPATH={tmp_path}"
    else:
        (tmp_path / "site" / "init").mkdir(parents=True)
        (tmp_path / "site" / "init" / "bash").write_text(MODULES % venv)
        variable = f"cluster.env.MODULESHOME={tmp_path / 'site'}"
    settings = ["kind=module", "modules=[python/tests]"]
    job = slurm_runs.submit_held(name, *(f"cluster.environment.{value}" for value in settings), variable)
    assert_ranks_use(f"{venv}/bin/python3", slurm_runs, name)
    devcluster.run("scontrol", "requeue", job)
    slurm_runs.release(name)
    slurm_runs.wait_queued_again(name)
    slurm_runs.start_now(job)
    slurm_runs.assert_finished_as(name, job, slurm_control)
    record = read_json(slurm_runs.run_dir(name).rank_environment) or {}
    assert (record["kind"], record["modules"]) == ("module", ["python/tests"])


def assert_ranks_use(python: str, slurm_runs: SlurmRuns, name: str) -> None:
    """Assert that all ranks of a running run were started with an interpreter."""
    ranks = [command for command in slurm_runs.processes(name) if PARENT_MODULE in command]
    assert len([command for command in ranks if command.startswith(f"{python} ")]) >= NUM_RANKS, ranks


# --- The parents of ranks on a real Slurm.


#: The GPUs of the dev cluster are not real.
CPU = "launch.device=cpu"


def parents(scene: FaultScene) -> dict[int, psutil.Process]:
    """Return the parent process of each rank, none of which may have started its rank by a command."""
    ranks = scene.runs.rank_processes(scene.name)
    found = {rank: psutil.Process(process.ppid()) for rank, process in ranks.items()}
    assert all(PARENT_MODULE in parent.cmdline() for parent in found.values())
    return found


def kill_and_wait_for_others(scene: FaultScene, victim: psutil.Process) -> None:
    """Kill a process, and wait until all ranks have been replaced by those of the next attempt."""
    before = scene.runs.rank_processes(scene.name)
    victim.kill()

    def are_replaced() -> bool:
        now = scene.runs.rank_processes(scene.name)
        return now.keys() == before.keys() and not set(now.values()) & set(before.values())

    wait_for(are_replaced, "the ranks of the next attempt")


@pytest.mark.quick_fault
def test_parents_fork_the_ranks_of_the_next_attempt(scene: FaultScene) -> None:
    """A rank is killed. The next one has the same parent, in the same step."""
    scene.submit_held("SIGKILL of a rank")
    before = parents(scene)
    assert sorted(before) == [0, 1, 2, 3]
    assert len({parent.pid for parent in before.values()}) == 4, "one for each task"
    step = scene.steps()
    kill_and_wait_for_others(scene, psutil.Process(scene.pid_of(3)))
    assert parents(scene) == before
    assert scene.steps() == step
    scene.release()
    scene.assert_recovered_from_checkpoint()
    assert "rank 3 on n2 was killed by SIGKILL, last heartbeat at step " in scene.runs.job_log(scene.name)
    assert (scene.num_starts(), scene.cell.attempts, scene.cell.restarts) == (1, 2, 1)
    assert "each rank imports torch itself" not in scene.runs.job_log(scene.name)


@pytest.mark.faults
def test_killed_parent_ends_its_rank_and_has_a_successor(scene: FaultScene) -> None:
    scene.submit_held("SIGKILL of a parent of ranks")
    before = parents(scene)
    kill_and_wait_for_others(scene, before[2])
    assert not set(parents(scene).values()) & set(before.values()), "a new step has started"
    scene.release()
    scene.assert_recovered_from_checkpoint()
    assert "rank 2 on n2 was killed by SIGKILL" in scene.runs.job_log(scene.name)
    assert (scene.num_starts(), scene.cell.attempts) == (1, 2)


@pytest.mark.faults
def test_killed_supervisor_leaves_no_parent(scene: FaultScene) -> None:
    """The next supervisor ends the step of the parents, and starts its own."""
    scene.submit_held("supervisor of forked ranks killed")
    before = parents(scene)
    os.kill(scene.runs.holder_pid(scene.name), signal.SIGKILL)
    scene.assert_recovered_from_checkpoint()
    assert (scene.num_starts(), scene.cell.attempts) == (1, 2)
    assert not any(parent.is_running() for parent in before.values())


@pytest.mark.faults
@pytest.mark.parametrize(
    ("settings", "visible"),
    [
        (["cluster.gpus_per_node=2"], dict.fromkeys(range(4), "0,1")),
        (["cluster.sbatch.gpus-per-task=1"], {0: "0", 1: "1", 2: "0", 3: "1"}),
    ],
    ids=["of-the-node", "of-the-task"],
)
def test_forked_ranks_see_the_gpus_of_their_task(
    scene: FaultScene, settings: list[str], visible: dict[int, str]
) -> None:
    scene.submit_held(f"GPUs of forked ranks, {len(set(visible.values()))}", *settings, CPU)
    assert sorted(parents(scene)) == [0, 1, 2, 3]
    ranks = scene.runs.rank_processes(scene.name)
    assert {rank: process.environ()["CUDA_VISIBLE_DEVICES"] for rank, process in ranks.items()} == visible
    kill_and_wait_for_others(scene, ranks[1])
    ranks = scene.runs.rank_processes(scene.name)
    assert {rank: process.environ()["CUDA_VISIBLE_DEVICES"] for rank, process in ranks.items()} == visible
    scene.release()
    scene.runs.assert_finished_as(scene.name, scene.job, scene.control)


@pytest.mark.slow
def test_job_gives_back_its_other_node_while_it_uploads(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    name = "uploads"
    # Nothing listens there, so the upload lasts until its time limit.
    job = slurm_runs.submit_held(name, "tracking.uri=http://127.0.0.1:9", "tracking.drain_timeout_s=15")
    assert devcluster.job(job)["NumNodes"] == "2"
    slurm_runs.release(name)
    wait_for(lambda: devcluster.job(job)["NumNodes"] == "1", "the job to give a node back", timeout_s=WAIT_S)
    assert devcluster.job(job)["JobState"] == "RUNNING"
    assert slurm_runs.state(name).status == "finished"
    state = slurm_runs.wait_end(name, job)
    assert state.status == "finished"
    assert devcluster.job(job)["JobState"] == "COMPLETED"
    assert "MLflow at http://127.0.0.1:9 has not received all records" in slurm_runs.job_log(name)
    ledger = slurm_runs.ledger(name, job)  # equals accounting
    assert ledger.allocated_s < NUM_RANKS * ledger.running_s, "a node and its cores are counted until then"


# --- A run with secrets on a real Slurm: its ranks receive them, and no output, file or process list contains them.


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
    on_nodes = {pid for pids in devcluster.node_members().values() for pid in pids}
    ranks = [found for pid, found in processes().items() if pid in on_nodes and "hpcdist.rank.worker" in found[0]]
    return [environ for command, environ in ranks if "srun" not in command.split("\0")[0]]


@pytest.mark.faults
def test_ranks_receive_secrets_that_appear_nowhere(
    slurm_runs: SlurmRuns, devcluster: DevCluster, tmp_path: Path
) -> None:
    server = Server(tmp_path)
    server.start()
    uri = server.uri.replace("http://", f"http://ada:{PASSWORD}@")
    arguments = [*slurm_runs.config(NAME, *OVERRIDES), "--cluster", "devcluster"]
    texts: dict[str, str] = {}  # outputs of commands and contents of files, by name
    try:
        for title, option in (("dry run", ["--dry-run"]), ("submit", [])):
            code, texts[title] = slurm_runs.command("submit", *arguments, *option, **SECRETS, MY_URI=uri)
            assert code == 0, texts[title]
        assert "# The supervisor sets WANDB_API_KEY from secrets.json" in texts["dry run"]
        run, job = slurm_runs.run_dir(NAME), slurm_runs.job_id(NAME)
        slurm_runs.wait_until_held(NAME, NUM_RANKS)
        assert [path.stat().st_mode & 0o077 for path in (run.secrets, run.path)] == [0, 0]
        texts |= slurm_output(devcluster, job)
        assert "supervise" in texts["batch script"]
        environments = rank_environments(devcluster)[-NUM_RANKS:]
        assert len(environments) == NUM_RANKS
        for environ in environments:
            assert "WANDB_API_KEY=cluster-s3cret-value\0" in environ
            assert "OTHER_TOKEN=launch-s3cret-value\0" in environ
            assert "HPCDIST_PARAMS_HUB_TOKEN=params-s3cret-value\0" in environ

        slurm_runs.release(NAME)
        state = slurm_runs.wait_end(NAME, job)
        assert state.status == "finished", f"{state}\n{slurm_runs.job_log(NAME)}"
        assert not run.secrets.exists()
        texts["slurmctld"] = (devcluster.layout.logs / "slurmctld.log").read_text(errors="replace")
        texts |= files(run.path)
        code, texts["sync"] = slurm_runs.command("sync", NAME, HPCDIST_TRACKING_URI=uri)
        assert code == 0, texts["sync"]
        with sqlite3.connect(tmp_path / "mlflow.db") as connection:
            query = "select value from params where key = 'params.hub_token'"
            assert connection.execute(query).fetchall() == [("***",)]
        texts |= files(tmp_path)  # while the server runs: the database's write-ahead log is a separate file
    finally:
        server.kill()
    assert {name for name, text in texts.items() if "s3cret" in text} == set()
