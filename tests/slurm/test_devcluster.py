"""The dev cluster: it behaves like any Slurm cluster, and `down` removes everything."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import runtime_cases
from containers import RUNTIMES, Containers, mismatch, mount_flags, small_image
from runtime_cases import PYXIS
from slurm_cluster import OWNER, DevCluster
from slurm_runs import SlurmRuns

from hpcdist.devcluster import cluster, cluster_cgroup, cluster_status, host, node_faults
from hpcdist.devcluster.settings import BARE_ENV, GPU_TYPE, Layout

NAMES = ["n1", "n2", "n3", "n4"]


def daemon_ids(devcluster: DevCluster) -> dict[str, str]:
    return {path.stem: path.read_text() for path in devcluster.layout.run.glob("*.pid") if "slurm-" not in path.name}


def test_each_node_has_its_own_host_name_and_address(devcluster: DevCluster) -> None:
    script = "echo $SLURM_PROCID $(hostname) $(hostname -i) $SLURM_NODEID/$SLURM_NNODES"
    lines = devcluster.run("srun", "--nodes=3", "--ntasks-per-node=2", "sh", "-c", script).splitlines()
    addresses = devcluster.settings.addresses
    places = [f"n{rank // 2 + 1}" for rank in range(6)]
    assert sorted(lines) == [f"{rank} {node} {addresses[node]} {rank // 2}/3" for rank, node in enumerate(places)]
    for name, address in addresses.items():
        assert devcluster.run("getent", "hosts", name).split() == [address, name]
        assert devcluster.run("srun", "--nodes=1", "getent", "hosts", address).split() == [address, name]


def test_up_is_idempotent_and_status_shows_the_cluster(devcluster: DevCluster) -> None:
    before = daemon_ids(devcluster)
    assert len(before) == 8
    done = devcluster.hpcdist("devcluster", "up", "--nodes", "4")
    assert done.returncode == 0, done.stderr
    assert daemon_ids(devcluster) == before
    done = devcluster.hpcdist("devcluster", "up", "--nodes", "5")
    assert done.returncode == 2
    assert done.stderr == "hpcdist: a dev cluster is running with --nodes 4, not 5: `hpcdist devcluster down` first\n"
    done = devcluster.hpcdist("devcluster", "status")
    assert done.returncode == 0, done.stderr
    assert re.match(rf"dev cluster hpcdist of {OWNER}, created .* ago\n", done.stdout)
    assert [line.split()[:3] for line in done.stdout.splitlines()[2:6]] == [
        [name, devcluster.settings.addresses[name], "idle"] for name in NAMES
    ]
    assert "partitions: main (default), high" in done.stdout
    assert f"export SLURM_CONF={devcluster.layout.slurm_conf}\n" in done.stdout


def test_cluster_of_another_user_is_left_alone(devcluster: DevCluster) -> None:
    before, ids = devcluster.layout.slurm_conf.stat(), daemon_ids(devcluster)
    ada = {"SUDO_USER": "ada"}
    done = devcluster.hpcdist("devcluster", "up", env=ada)
    assert done.returncode == 2
    error = rf"hpcdist: dev cluster hpcdist of {OWNER}, created .* ago, is not a cluster of ada: `.* --name NAME`"
    assert re.match(error, done.stderr)
    done = devcluster.hpcdist("devcluster", "down", env=ada)
    assert done.returncode == 2
    assert done.stderr.endswith(": it is not a cluster of ada. `hpcdist devcluster down --yes` removes it\n")
    after = devcluster.layout.slurm_conf.stat()
    assert (after.st_mtime_ns, after.st_ino, daemon_ids(devcluster)) == (before.st_mtime_ns, before.st_ino, ids)
    assert cluster_status.status(devcluster.layout).is_up


def test_second_cluster_beside_the_first(devcluster: DevCluster) -> None:
    ids, hosts = daemon_ids(devcluster), host.HOSTS.read_text()
    layout, name = Layout("second"), ("--name", "second")
    job = devcluster.sbatch("sleep 600", "--nodelist=n1")
    devcluster.wait_job_state(job, "RUNNING")
    options = ("--nodes", "2", "--proctrack", devcluster.settings.proctrack)
    done = devcluster.hpcdist("devcluster", "up", *name, *options, env={"SUDO_USER": "nobody"})
    try:
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("dev cluster second of nobody, created ")
        assert f"another dev cluster hpcdist of {OWNER}, created " in done.stdout
        assert "another dev cluster second of nobody" in devcluster.hpcdist("devcluster", "status").stdout
        recorded = cluster_status.recorded_settings(layout)
        assert recorded is not None
        second = DevCluster(layout, recorded, hosts)
        assert (host.LINKS / layout.link / "ifalias").read_text() == "dev cluster second of nobody\n"
        for one, title in ((devcluster, "hpcdist"), (second, "second")):
            assert re.search(rf"ClusterName += {title}\n", one.run("scontrol", "show", "config"))
            for node, address in one.settings.addresses.items():
                assert one.run("getent", "hosts", node).split() == [address, node]
        assert sorted(second.run("srun", "--nodes=2", "hostname").split()) == ["second-n1", "second-n2"]
        assert sorted(devcluster.run("srun", "--nodes=4", "hostname").split()) == NAMES

        for verb, dead in (("kill", ("slurmd-second-n2",)), ("start", ())):
            done = second.hpcdist("devcluster", "node", verb, "second-n2", *name)
            assert done.returncode == 0, done.stderr
            assert cluster_status.status(layout).dead == dead
        again = devcluster.hpcdist("devcluster", "up")
        assert again.returncode == 0, again.stderr
        assert daemon_ids(devcluster) == ids

        waiting = second.sbatch("sleep 600", "--begin=now+1hour")
        done = second.hpcdist("devcluster", "down", *name, env={"SUDO_USER": "nobody"})
        assert (done.returncode, "its 1 job of root would end." in done.stderr) == (2, True)
        assert second.job(waiting)["JobState"] == "PENDING"
    finally:
        done = devcluster.hpcdist("devcluster", "down", *name, "--yes")
    assert done.returncode == 0, done.stderr
    assert not layout.state.exists()
    assert layout.link not in os.listdir("/sys/class/net")
    assert str(layout.state) not in Path("/proc/self/mounts").read_text()
    assert host.HOSTS.read_text() == hosts
    assert (devcluster.job(job)["JobState"], daemon_ids(devcluster)) == ("RUNNING", ids)


def test_only_requested_fake_gpus_are_visible(devcluster: DevCluster) -> None:
    for flags, visible in ((["--gpus-per-node=1"], "0"), ([f"--gpus-per-node={GPU_TYPE}:2"], "0,1"), ([], "none")):
        command = ("srun", "--nodes=2", *flags, "sh", "-c", "echo ${CUDA_VISIBLE_DEVICES-none}")
        assert devcluster.run(*command).splitlines() == [visible] * 2


@pytest.mark.faults
def test_killed_node_is_marked_down_and_can_be_restarted(devcluster: DevCluster) -> None:
    def state() -> str:
        return next(node.state for node in cluster_status.status(devcluster.layout).nodes if node.name == "n4")

    job = devcluster.sbatch("sleep 600", "--nodelist=n4", "--no-requeue")
    devcluster.wait_job_state(job, "RUNNING")
    done = devcluster.hpcdist("devcluster", "node", "kill", "n4")
    assert done.returncode == 0, done.stderr
    assert devcluster.node_members()["n4"] == []
    assert cluster_status.status(devcluster.layout).dead == ("slurmd-n4",)
    devcluster.wait_until(lambda: state() == "down*", "Slurm marks the node as down")
    assert devcluster.job(job)["JobState"] == "NODE_FAIL"
    done = devcluster.hpcdist("devcluster", "node", "start", "n4")
    assert done.returncode == 0, done.stderr
    assert state() == "idle"
    assert devcluster.run("srun", "--nodelist=n4", "hostname") == "n4\n"


@pytest.mark.faults
def test_up_restarts_killed_daemons_while_the_job_continues(devcluster: DevCluster) -> None:
    job = devcluster.sbatch("sleep 600", "--nodelist=n1", "--job-name=survivor")
    devcluster.wait_job_state(job, "RUNNING")
    saved = devcluster.layout.controller / "job_state"  # written some seconds later
    devcluster.wait_until(lambda: saved.exists() and b"survivor" in saved.read_bytes(), "slurmctld has saved the job")
    before = daemon_ids(devcluster)
    names = ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd-n1")
    for name in names:
        os.kill(int(before[name]), signal.SIGKILL)
    devcluster.wait_until(
        lambda: set(cluster_status.status(devcluster.layout).dead) == set(names), "the daemons are dead"
    )
    assert devcluster.hpcdist("devcluster", "status").returncode == 1
    cluster.up(devcluster.layout, {}, env={})
    assert devcluster.job(job)["JobState"] == "RUNNING"
    assert cluster_status.status(devcluster.layout).is_up


def left_behind(devcluster: DevCluster) -> list[str]:
    """Return the files, links, mounts and processes of the cluster that exist on this machine."""
    layout = devcluster.layout
    found = [str(layout.state)] if layout.state.exists() else []
    found += [f"link {name}" for name in os.listdir("/sys/class/net") if name in (layout.link, *NAMES)]
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(layout.state) in line]
    found += ["hosts"] if host.HOSTS.read_text() != devcluster.hosts_before else []
    state = str(layout.state).encode()
    conf = f"SLURM_CONF={layout.slurm_conf}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, env = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        # Not SLURM_CONF alone: it may be set in the shell that started the tests. Not a node's name alone: tests that
        # run at the same time imitate Slurm.
        is_on_node = conf in env and b"SLURMD_NODENAME=n" in env
        if state in command or b"MYSQL_UNIX_PORT=" + state in env or is_on_node:
            found.append(command.decode(errors="replace"))
    return found


def test_down_removes_everything_even_with_running_jobs(devcluster: DevCluster) -> None:
    job = devcluster.sbatch("srun sleep 600", "--nodes=4", "--ntasks-per-node=2")
    devcluster.wait_until(lambda: "RUNNING" in devcluster.run("sacct", "-nPj", f"{job}.0", "-oState"), "the step runs")
    assert left_behind(devcluster) != []
    done = devcluster.hpcdist("devcluster", "down")
    assert done.returncode == 2
    assert done.stderr.endswith(": its 1 job of root would end. `hpcdist devcluster down --yes` removes it\n")
    assert devcluster.job(job)["JobState"] == "RUNNING"
    done = devcluster.hpcdist("devcluster", "down", "--yes")
    try:
        assert done.returncode == 0, done.stderr
        assert left_behind(devcluster) == []
        status = devcluster.hpcdist("devcluster", "status")
        assert (status.returncode, status.stdout.split(":")[0]) == (1, f"no dev cluster in {devcluster.layout.state}")
        again = devcluster.hpcdist("devcluster", "down")
        assert again.returncode == 0, again.stderr
    finally:
        devcluster.restart()
    assert sorted(devcluster.run("srun", "--nodes=4", "hostname").split()) == NAMES


@pytest.mark.slow
def test_cluster_that_tracks_processes_by_cgroups(devcluster: DevCluster) -> None:
    if not cluster_cgroup.are_usable():
        pytest.skip("root cannot create cgroups of version 1 on this machine")
    layout = devcluster.layout
    cluster.down(layout)
    try:
        cluster.up(layout, {"num_nodes": 1}, env={})
        assert "proctrack/cgroup" in devcluster.run("scontrol", "show", "config"), "the default"
        own = cluster_cgroup.ROOT / cluster_cgroup.FREEZER / layout.cgroup_name.read_text()
        devcluster.sbatch("sleep 600")
        devcluster.wait_until(lambda: list(own.rglob("step_batch")), "the batch step has a cgroup")
        cluster.down(layout)
        assert not own.exists()
        assert str(layout.state) not in Path("/proc/self/mounts").read_text()
    finally:
        cluster.down(layout)
        devcluster.restart()


@pytest.mark.slow
def test_up_where_only_root_may_write_to_tmp(
    devcluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, options = Layout("closed"), {"num_nodes": 1, "proctrack": devcluster.settings.proctrack}
    tmp_path.chmod(0o755)
    monkeypatch.setitem(BARE_ENV, "TMPDIR", str(tmp_path))  # stands for a closed /tmp
    try:
        cluster.up(layout, options, env={})
        assert cluster_status.status(layout).is_up
    finally:
        cluster.down(layout)


@pytest.mark.slow
def test_down_cleans_up_after_kills_and_an_interrupted_up(devcluster: DevCluster) -> None:
    layout = devcluster.layout
    for pid in daemon_ids(devcluster).values():
        os.kill(int(pid), signal.SIGKILL)
    cluster.down(layout)
    try:
        assert left_behind(devcluster) == []
        unfinished = layout.database.with_name("mariadb-new")
        with subprocess.Popen([sys.executable, "-m", "hpcdist", "devcluster", "up"]) as up:
            deadline = time.monotonic() + 60
            while not unfinished.exists():
                assert time.monotonic() < deadline, "up has not started the database"
                time.sleep(0.01)
            up.kill()
        assert left_behind(devcluster) != []
        assert host.HOSTS.read_text() == devcluster.hosts_before, "up was killed before it changed /etc/hosts"
        cluster.down(layout)
        assert left_behind(devcluster) == []
    finally:
        devcluster.restart()
    assert devcluster.run("srun", "--nodes=1", "hostname") == "n1\n"


# --- `hpcdist devcluster up --runtime`: runs in containers, with nothing prepared but what `up` prints.


#: Runtime, the form of the image, and the further options of `up`.
CASES = {
    "apptainer": ("apptainer-sif", ()),
    "pyxis": ("pyxis", ("--pyxis-plugin", str(PYXIS))),
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with all runtimes on its PATH."""
    bins = ":".join(str(RUNTIMES / name / "bin") for name in ("apptainer", "enroot"))
    monkeypatch.setenv("PATH", f"{bins}:{os.environ['PATH']}")


@pytest.fixture
def stopped(devcluster: DevCluster) -> Iterator[DevCluster]:
    """The cluster of the other tests is down; it is up again afterwards."""
    cluster.down(devcluster.layout)
    yield devcluster
    cluster.down(devcluster.layout)
    devcluster.restart()


@pytest.mark.faults
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("runtime", CASES)
def test_run_in_containers(
    runtime: str,
    stopped: DevCluster,
    slurm_runs: SlurmRuns,
    slurm_control: str,
    containers: Containers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, options = CASES[runtime]
    if (reason := mismatch() or runtime_cases.missing_program(case)) is not None:
        pytest.skip(reason)
    image = small_image(containers)
    before = left_behind(stopped)
    done = stopped.hpcdist("devcluster", "up", "--nodes", "2", "--runtime", runtime, *options)
    assert done.returncode == 0, done.stderr
    printed = re.search(r"^  export PATH=(.*):\$PATH$", done.stdout, re.MULTILINE)
    assert printed, done.stdout
    monkeypatch.setenv("PATH", f"{printed[1]}:{os.environ['PATH']}")
    reference = image.sif("apptainer") if runtime == "apptainer" else image.sqsh
    flags = ",".join(f"'{flag}'" for flag in mount_flags(runtime))
    container = (
        f"container.runtime={runtime}",
        f"container.image={reference}",
        f"container.mounts=[{slurm_runs.no_mlflow}]",
        f"container.extra_args=[{flags}]",
    )
    name = f"devcluster-{runtime}"
    job = slurm_runs.submit(name, *container)
    slurm_runs.assert_finished_as(name, job, slurm_control)
    assert slurm_runs.hosts(name) == ["n1", "n1", "n2", "n2"]

    node_faults.kill_node(stopped.layout, "n2")
    node_faults.start_node(stopped.layout, "n2")
    stopped.restore_nodes()
    job = slurm_runs.submit(f"{name}-again", *container)
    slurm_runs.assert_finished_as(f"{name}-again", job, slurm_control)

    done = stopped.hpcdist("devcluster", "down", "--yes")
    assert done.returncode == 0, done.stderr
    assert left_behind(stopped) == before
