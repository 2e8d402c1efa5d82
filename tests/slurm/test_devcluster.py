"""The dev cluster: it behaves like any Slurm cluster, and `down` removes everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import DevCluster

from hpcdist.devcluster import cluster, host, settings
from hpcdist.devcluster.settings import HOST, LINK

NAMES = ["n1", "n2", "n3", "n4"]


def daemon_ids(devcluster: DevCluster) -> dict[str, str]:
    return {path.stem: path.read_text() for path in devcluster.layout.run.glob("*.pid") if "slurm-" not in path.name}


def test_each_node_has_its_own_host_name_and_address(devcluster: DevCluster) -> None:
    script = "echo $SLURM_PROCID $(hostname) $(hostname -i) $SLURM_NODEID/$SLURM_NNODES"
    lines = devcluster.run("srun", "--nodes=3", "--ntasks-per-node=2", "sh", "-c", script).splitlines()
    assert sorted(lines) == [
        f"{rank} n{rank // 2 + 1} {devcluster.settings.addresses[f'n{rank // 2 + 1}']} {rank // 2}/3"
        for rank in range(6)
    ]


def test_node_names_and_addresses_resolve_on_the_host_and_on_nodes(devcluster: DevCluster) -> None:
    for name, address in devcluster.settings.addresses.items():
        assert devcluster.run("getent", "hosts", name).split() == [address, name]
        assert devcluster.run("srun", "--nodes=1", "getent", "hosts", address).split() == [address, name]


def test_up_is_idempotent(devcluster: DevCluster) -> None:
    before = daemon_ids(devcluster)
    assert len(before) == 8
    done = devcluster.hpcdist("devcluster", "up", "--nodes", "4")
    assert done.returncode == 0, done.stderr
    assert daemon_ids(devcluster) == before


def test_up_rejects_a_node_count_that_differs_from_the_running_cluster(devcluster: DevCluster) -> None:
    done = devcluster.hpcdist("devcluster", "up", "--nodes", "5")
    assert done.returncode == 2
    assert done.stderr == "hpcdist: a dev cluster is running with --nodes 4, not 5: `hpcdist devcluster down` first\n"


def test_status_shows_nodes_partitions_and_slurm_conf(devcluster: DevCluster) -> None:
    done = devcluster.hpcdist("devcluster", "status")
    assert done.returncode == 0, done.stderr
    assert [line.split()[:3] for line in done.stdout.splitlines()[1:5]] == [
        [name, devcluster.settings.addresses[name], "idle"] for name in NAMES
    ]
    assert "partitions: main (default), high" in done.stdout
    assert f"export SLURM_CONF={devcluster.layout.slurm_conf}\n" in done.stdout


def test_sacct_lists_ended_jobs(devcluster: DevCluster) -> None:
    good = devcluster.sbatch("srun true", "--nodes=2", "--gpus-per-node=1")
    bad = devcluster.sbatch("exit 3")
    ended = ("COMPLETED", "FAILED")

    def record() -> list[str]:
        fields = "JobID,State,ExitCode,Account,AllocNodes,AllocTRES"
        return devcluster.run("sacct", "-XnP", f"--jobs={good},{bad}", f"--format={fields}").splitlines()

    devcluster.wait_until(lambda: sum(line.split("|")[1] in ended for line in record()) == 2, "both jobs are in sacct")
    assert record() == [
        f"{good}|COMPLETED|0:0|root|2|billing=2,cpu=2,gres/gpu=2,node=2",
        f"{bad}|FAILED|3:0|root|1|billing=1,cpu=1,node=1",
    ]


@pytest.mark.parametrize(("gpus", "visible"), [(1, "0"), (2, "0,1")])
def test_requested_fake_gpus_are_visible(devcluster: DevCluster, gpus: int, visible: str) -> None:
    command = ("srun", "--nodes=2", f"--gpus-per-node={gpus}", "sh", "-c", "echo $(hostname) $CUDA_VISIBLE_DEVICES")
    assert sorted(devcluster.run(*command).splitlines()) == [f"n1 {visible}", f"n2 {visible}"]


def test_job_without_gpu_request_sees_no_gpu(devcluster: DevCluster) -> None:
    assert devcluster.run("srun", "sh", "-c", "echo ${CUDA_VISIBLE_DEVICES-none}") == "none\n"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--partition=nowhere", "Invalid partition name specified"),
        ("--account=nobody", "Invalid account or account/partition combination specified"),
    ],
)
def test_sbatch_rejects_invalid_requests(devcluster: DevCluster, flag: str, message: str) -> None:
    command = ["sbatch", flag, "--wrap=true"]
    done = subprocess.run(command, env=devcluster.env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert message in done.stderr


def test_job_of_partition_main_is_preempted_requeued_and_restarted(devcluster: DevCluster, tmp_path: Path) -> None:
    output = tmp_path / "out"
    script = "trap 'echo TERM' TERM; echo start $SLURM_RESTART_COUNT; for i in $(seq 600); do sleep 0.1; done"
    low = devcluster.sbatch(script, "--partition=main", "--nodes=4", "--exclusive", "--requeue", output=output)
    devcluster.wait_until(lambda: output.exists() and output.read_text() == "start\n", "the first attempt runs")
    high = devcluster.start_high_priority_job("--nodes=4")
    devcluster.wait_job_state(high, "COMPLETED")
    devcluster.wait_job_state(low, "PENDING")
    assert devcluster.job(low)["Restarts"] == "1"
    devcluster.run("scontrol", "update", f"JobId={low}", "StartTime=now")
    devcluster.wait_until(lambda: "start 1\n" in output.read_text(), "the second attempt runs")
    assert "TERM\n" in output.read_text()


@pytest.mark.faults
def test_grace_time_delays_the_end_of_a_preempted_job(devcluster: DevCluster, tmp_path: Path) -> None:
    output = tmp_path / "out"
    script = "trap 'date +%s' TERM; echo start; while :; do sleep 0.1; done"
    cluster.set_grace_time(devcluster.layout, 4)
    try:
        low = devcluster.sbatch(script, "--partition=main", "--nodes=4", "--exclusive", "--requeue", output=output)
        devcluster.wait_until(lambda: output.exists() and output.read_text() == "start\n", "the first attempt runs")
        high = devcluster.sbatch("date +%s", "--partition=high", "--nodes=4", "--exclusive", output=tmp_path / "high")
        devcluster.wait_job_state(high, "COMPLETED")
    finally:
        cluster.set_grace_time(devcluster.layout, 0)
    signalled = int(next(line for line in output.read_text().splitlines() if line.isdigit()))
    assert int((tmp_path / "high").read_text()) - signalled >= 3, f"job {low} ended without a grace time"


@pytest.mark.faults
def test_killed_node_is_marked_down_and_can_be_restarted(devcluster: DevCluster) -> None:
    def state() -> str:
        return next(node.state for node in cluster.status(devcluster.layout).nodes if node.name == "n4")

    job = devcluster.sbatch("sleep 600", "--nodelist=n4", "--no-requeue")
    devcluster.wait_job_state(job, "RUNNING")
    done = devcluster.hpcdist("devcluster", "node", "kill", "n4")
    assert done.returncode == 0, done.stderr
    assert host.node_members(devcluster.layout, devcluster.settings)["n4"] == []
    assert cluster.status(devcluster.layout).dead == ("slurmd-n4",)
    devcluster.wait_until(lambda: state() == "down*", "Slurm marks the node as down")
    assert devcluster.job(job)["JobState"] == "NODE_FAIL"
    done = devcluster.hpcdist("devcluster", "node", "start", "n4")
    assert done.returncode == 0, done.stderr
    assert state() == "idle"
    assert devcluster.run("srun", "--nodelist=n4", "hostname") == "n4\n"


def send_to_node(devcluster: DevCluster, name: str, num_bytes: int) -> float:
    """Return the seconds for sending `num_bytes` from this machine to a node."""
    receive = (
        "import socket; s = socket.create_server(('', 9999)); print(flush=True); c, _ = s.accept()\n"
        f"n = {num_bytes}\nwhile n: n -= len(c.recv(65536))\nc.send(b'x')"
    )
    send = (
        "import socket, sys, time; s = socket.create_connection((sys.argv[1], 9999)); start = time.monotonic()\n"
        f"s.sendall(bytes({num_bytes})); s.recv(1); print(time.monotonic() - start)"
    )
    command = settings.on_node(devcluster.layout, name, [sys.executable, "-c", receive])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        receiver.stdout.readline()
        return float(devcluster.run(sys.executable, "-c", send, devcluster.settings.addresses[name]))


def test_slow_node_limits_the_bandwidth_of_one_node_and_restores_it(devcluster: DevCluster) -> None:
    cluster.slow_node(devcluster.layout, "n2", rate_mbit=2)
    try:
        slow_s = send_to_node(devcluster, "n2", 600_000)
        other_s = send_to_node(devcluster, "n3", 600_000)
    finally:
        cluster.slow_node(devcluster.layout, "n2")
    full_s = send_to_node(devcluster, "n2", 600_000)
    assert slow_s > 1.5  # 600 kB less the burst, at 2 Mbit/s
    assert full_s < slow_s / 2
    assert other_s < slow_s / 2


def test_nodes_reach_services_of_this_machine(devcluster: DevCluster) -> None:
    """A tracking server on this machine, for example."""
    script = f"import socket; socket.create_connection(('{HOST}', int(__import__('sys').argv[1]))).send(b'hello')"
    serve = (
        "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True)\n"
        "c, peer = s.accept(); print(c.recv(9).decode(), peer[0])"
    )
    with subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        devcluster.run("srun", "--nodelist=n3", sys.executable, "-c", script, port)
        assert server.stdout.read() == f"hello {devcluster.settings.addresses['n3']}\n"


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
    devcluster.wait_until(lambda: set(cluster.status(devcluster.layout).dead) == set(names), "the daemons are dead")
    assert devcluster.hpcdist("devcluster", "status").returncode == 1
    cluster.up(devcluster.layout, {}, env={})
    assert devcluster.job(job)["JobState"] == "RUNNING"
    assert cluster.status(devcluster.layout).is_up


def left_behind(devcluster: DevCluster) -> list[str]:
    """Return the files, links, mounts and processes of the cluster that exist on this machine."""
    layout = devcluster.layout
    found = [str(layout.state)] if layout.state.exists() else []
    found += [f"link {name}" for name in os.listdir("/sys/class/net") if name in (LINK, *NAMES)]
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(layout.state) in line]
    found += ["hosts"] if host.HOSTS.read_text() != devcluster.hosts_before else []
    state = str(layout.state).encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, env = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        # Not SLURM_CONF: it may be set in the shell that started the tests.
        if state in command or b"MYSQL_UNIX_PORT=" + state in env or b"SLURMD_NODENAME=n" in env:
            found.append(command.decode(errors="replace"))
    return found


def test_down_removes_everything_even_with_running_jobs(devcluster: DevCluster) -> None:
    job = devcluster.sbatch("srun sleep 600", "--nodes=4", "--ntasks-per-node=2")
    devcluster.wait_until(lambda: "RUNNING" in devcluster.run("sacct", "-nPj", f"{job}.0", "-oState"), "the step runs")
    assert left_behind(devcluster) != []
    done = devcluster.hpcdist("devcluster", "down")
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
    if not host.are_usable():
        pytest.skip("root cannot create cgroups of version 1 on this machine")
    layout = devcluster.layout
    cluster.down(layout)
    try:
        cluster.up(layout, {"num_nodes": 1}, env={})
        assert "proctrack/cgroup" in devcluster.run("scontrol", "show", "config"), "the default"
        own = host.ROOT / host.FREEZER / layout.cgroup_name.read_text()
        devcluster.sbatch("sleep 600")
        devcluster.wait_until(lambda: list(own.rglob("step_batch")), "the batch step has a cgroup")
        cluster.down(layout)
        assert not own.exists()
        assert str(layout.state) not in Path("/proc/self/mounts").read_text()
    finally:
        cluster.down(layout)
        devcluster.restart()


@pytest.mark.slow
def test_down_cleans_up_after_killed_daemons_and_an_interrupted_up(devcluster: DevCluster) -> None:
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
        assert settings.BEGIN not in host.HOSTS.read_text(), "up was killed before it changed /etc/hosts"
        cluster.down(layout)
        assert left_behind(devcluster) == []
    finally:
        devcluster.restart()
    assert devcluster.run("srun", "--nodes=1", "hostname") == "n1\n"
