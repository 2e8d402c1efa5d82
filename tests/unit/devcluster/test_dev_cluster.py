"""The dev cluster without root: its errors, configuration files and commands."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.devcluster import cluster, host
from hpcdist.devcluster.cluster import NodeStatus, Status, describe
from hpcdist.devcluster.settings import (
    BARE_ENV,
    LINK,
    SLURMCTLD,
    Layout,
    Settings,
    gres_conf,
    slurm_conf,
    taken_names,
    with_hosts_block,
    without_hosts_block,
)
from hpcdist.errors import DevClusterError

Patch = pytest.MonkeyPatch
LOCK = host.LOCK
TWO = Settings(num_nodes=2)


@pytest.fixture
def layout() -> Iterator[Layout]:
    """A state folder with a short path, because paths of sockets are limited."""
    folder = Path(tempfile.mkdtemp(prefix="dc", dir="/tmp"))
    yield Layout(folder / "state")
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: Patch) -> None:
    """A separate lock: a dev cluster may be starting on this machine."""
    monkeypatch.setattr(host, "LOCK", tmp_path / "lock")


@pytest.fixture
def recorded(layout: Layout) -> Layout:
    """The state folder of a cluster of two nodes that is not running."""
    layout.state.mkdir()
    layout.settings_file.write_text(TWO.to_json())
    return layout


@pytest.fixture
def as_root(monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def test_truncated_settings_file_counts_as_no_cluster(recorded: Layout) -> None:
    assert cluster.recorded_settings(recorded) == TWO
    recorded.settings_file.write_text(TWO.to_json()[:-5])
    assert cluster.recorded_settings(recorded) is None
    with pytest.raises(ValueError, match="not the settings of a dev cluster of this version"):
        Settings.from_json(json.dumps({"num_nodes": 2}))


def test_commands_that_need_root_report_it(layout: Layout, monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    by_node = [
        lambda call=call: call(layout, "n1") for call in (cluster.kill_node, cluster.start_node, cluster.slow_node)
    ]
    for call in (lambda: cluster.up(layout, {}, env={}), lambda: cluster.down(layout), *by_node):
        with pytest.raises(DevClusterError, match=r"needs root .*: sudo \$\(which hpcdist\) devcluster "):
            call()


def test_missing_commands_are_reported_with_the_install_option(monkeypatch: Patch) -> None:
    monkeypatch.setattr(host, "COMMANDS", ("sh", "no-such-command"))
    with pytest.raises(DevClusterError, match=r"^no-such-command not found: `hpcdist devcluster up --install` .*munge"):
        host.require_commands()


def test_missing_container_runtime_is_an_error(layout: Layout, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setitem(BARE_ENV, "PATH", str(tmp_path))
    env = {"PATH": f"{layout.bin}:{tmp_path}"}
    settings = replace(TWO, runtime="apptainer")
    layout.bin.mkdir(parents=True)
    put_command(layout.bin / "apptainer", "true")
    with pytest.raises(DevClusterError, match=r"--runtime apptainer: apptainer not found on PATH: install"):
        host.find_programs(settings, layout, env)  # the script of an earlier `up` is no program
    put_command(tmp_path / "apptainer", "true")
    assert host.find_programs(settings, layout, env)["apptainer"] == tmp_path / "apptainer"


def test_missing_plugin_of_pyxis_is_an_error(layout: Layout, tmp_path: Path) -> None:
    put_command(tmp_path / "enroot", "true")
    settings = replace(TWO, runtime="pyxis", pyxis_plugin=f"{tmp_path}/spank_pyxis.so")
    with pytest.raises(DevClusterError, match=r"--pyxis-plugin .*spank_pyxis.so: no such file: build pyxis"):
        host.find_programs(settings, layout, {"PATH": str(tmp_path)})
    (tmp_path / "spank_pyxis.so").touch()
    assert host.find_programs(settings, layout, {"PATH": str(tmp_path)}) == {"enroot": tmp_path / "enroot"}


@pytest.mark.processes
def test_another_slurm_on_this_machine_is_an_error(layout: Layout, tmp_path: Path) -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    shutil.copy(sleep, tmp_path / "slurmctld")
    # The tests of Slurm may run a dev cluster at the same time.
    with subprocess.Popen([tmp_path / "slurmctld", "60"]) as daemon:
        try:
            with pytest.raises(DevClusterError, match=r"^slurm\w+ \(process \d+\) .* beside another Slurm"):
                host.refuse_beside_slurm(layout)
        finally:
            daemon.kill()


def test_cluster_without_usable_cgroups(layout: Layout, tmp_path: Path, monkeypatch: Patch) -> None:
    """In a container, for example. Then linuxproc is the default."""
    monkeypatch.setattr(host, "ROOT", tmp_path / "absent")
    assert cluster._choose(layout, {}).proctrack == "linuxproc"
    host.require_cgroups(Settings(proctrack="linuxproc"))
    with pytest.raises(
        DevClusterError, match=r"--proctrack cgroup: root cannot create cgroups of version 1 in .*linuxproc, or"
    ):
        host.require_cgroups(cluster._choose(layout, {"proctrack": "cgroup"}))


def test_removed_cgroup_includes_those_below_it(recorded: Layout, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(host, "ROOT", tmp_path)
    recorded.cgroups.mkdir()
    recorded.cgroup_name.write_text("own")
    for name in ("own/slurm_n1/uid_0/job_1", "own/slurm_n2", "other/slurm_n1"):
        (tmp_path / host.FREEZER / name).mkdir(parents=True)
    host.remove(recorded)
    assert os.listdir(tmp_path / host.FREEZER) == ["other"]


def test_used_names_and_networks_are_errors(layout: Layout, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(host, "HOSTS", tmp_path / "hosts")
    host.HOSTS.write_text("10.0.0.1 n1\n")
    with pytest.raises(DevClusterError, match="hosts already names n1"):
        host.require_free_network(TWO, layout)
    host.HOSTS.write_text("")
    routes = f"10.213.77.0/24 dev {LINK} proto kernel scope link src 10.213.77.253\n"
    monkeypatch.setattr(host, "Path", lambda name: layout.state / "no such interface")
    monkeypatch.setattr(host, "run", lambda command: routes)
    host.require_free_network(TWO, layout)
    routes += "10.213.77.0/25 dev tun0 scope link \n"
    with pytest.raises(
        DevClusterError, match=r"uses addresses of 10.213.77.0/24, .*: 10.213.77.0/25 dev tun0 scope link$"
    ):
        host.require_free_network(TWO, layout)


def test_etc_hosts_is_written_in_place(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(host, "HOSTS", tmp_path / "hosts")
    host.HOSTS.write_text("a long line that goes\n")
    inode = host.HOSTS.stat().st_ino
    host.write_hosts("short\n")
    assert host.HOSTS.read_text() == "short\n"
    assert host.HOSTS.stat().st_ino == inode


@pytest.fixture
def bare_machine(monkeypatch: Patch, tmp_path: Path) -> Path:
    """A machine without the packages: the only folder on PATH."""
    monkeypatch.setattr(host, "COMMANDS", ("no-such-command",))
    monkeypatch.setattr(host, "SITE_CONF", tmp_path / "slurm.conf")
    monkeypatch.setattr(host, "POLICY", tmp_path / "policy-rc.d")
    monkeypatch.setitem(BARE_ENV, "PATH", str(tmp_path))
    return tmp_path


def put_command(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_install_is_rejected_beside_another_slurm_and_without_apt_get(bare_machine: Path) -> None:
    with pytest.raises(DevClusterError, match=r"--install supports apt-get only: install slurmctld .* by the package"):
        host.install({})
    host.SITE_CONF.touch()
    with pytest.raises(DevClusterError, match=r"slurm.conf belongs to another Slurm on this machine"):
        host.install({})


@pytest.mark.processes
def test_failed_install_reports_the_last_error(bare_machine: Path) -> None:
    put_command(bare_machine / "apt-get", "echo 'E: no network' >&2; exit 100")
    with pytest.raises(DevClusterError, match=r"`apt-get .* update` failed: E: no network"):
        host.install({})
    assert not host.POLICY.exists()


@pytest.mark.processes
def test_install_prevents_packages_from_starting_services(bare_machine: Path) -> None:
    seen = bare_machine / "seen"
    script = f"{host.POLICY} slurmctld start; echo $6 $? >> {seen}; : > {bare_machine}/no-such-command"
    put_command(bare_machine / "apt-get", f"{script}; /bin/chmod +x {bare_machine}/no-such-command")
    host.install({})
    assert seen.read_text() == "update 101\ninstall 101\n"
    assert not host.POLICY.exists()
    host.POLICY.write_text("#!/bin/sh\nexit 101\n")
    (bare_machine / "no-such-command").unlink()
    host.install({})
    assert host.POLICY.exists(), "a policy of the site is kept"


@pytest.mark.processes
def test_failed_command_is_reported_with_its_last_line(monkeypatch: Patch) -> None:
    with pytest.raises(DevClusterError, match=r"^`sh -c 'echo first; echo last >&2; exit 3'` failed: last$"):
        host.run(["sh", "-c", "echo first; echo last >&2; exit 3"])
    with pytest.raises(DevClusterError, match=r"`false` failed: exit code 1$"):
        host.run(["false"])
    with pytest.raises(DevClusterError, match=r"^no-such-command not found: is the package"):
        host.run(["no-such-command"])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "SLURM_JOB_ID" not in host.run(["env"], env={"SLURM_CONF": "/x"}), "no variables of the caller"
    assert "SLURM_CONF=/x\n" in host.run(["env"], env={"SLURM_CONF": "/x"})


def test_exclusive_lock_of_root_allows_one_command_at_a_time(monkeypatch: Patch) -> None:
    assert LOCK.parent.stat().st_uid == 0
    assert not LOCK.parent.stat().st_mode & 0o022
    monkeypatch.setattr(host, "LOCK_WITHIN_S", 0.1)
    with host.exclusive(), pytest.raises(DevClusterError, match="another `hpcdist devcluster` is at work"):
        host.exclusive().__enter__()
    with host.exclusive():
        pass


@pytest.mark.processes
def test_wait_fails_with_the_last_output_after_a_timeout_and_if_the_daemon_ends(recorded: Layout) -> None:
    recorded.logs.mkdir()
    recorded.run.mkdir()
    recorded.output("slurmctld").write_text("starting\nfatal: no such thing\n")
    with pytest.raises(DevClusterError, match=r"^it is silent within 0 s; .*slurmctld.out ends with: fatal: no such"):
        host.wait_until(lambda: False, "it is silent", recorded, SLURMCTLD, 0)
    recorded.output("slurmctld").write_text("")
    ended = subprocess.Popen(["true"])
    ended.wait()
    recorded.pid_file("slurmctld").write_text(str(ended.pid))
    with pytest.raises(DevClusterError, match=r"^slurmctld ended at once; .* ends with: nothing"):
        host.wait_until(lambda: False, "it is silent", recorded, SLURMCTLD, 60)


def test_stale_pid_file_is_ignored(recorded: Layout, monkeypatch: Patch, as_root: None) -> None:
    recorded.run.mkdir()
    recorded.pid_file("slurmctld").write_text(str(os.getpid()))
    assert not host.is_running(recorded, SLURMCTLD)
    own = os.stat("/proc/self/ns/net")
    monkeypatch.setattr(host, "mounted_namespaces", lambda layout: {"devcluster-head": (own.st_dev, own.st_ino)})
    assert host.is_running(recorded, SLURMCTLD)


def test_remains_of_a_crash_are_removed(recorded: Layout) -> None:
    recorded.conf.mkdir()
    assert cluster._choose(recorded, {}) == TWO
    eight = cluster._choose(recorded, {"num_nodes": 8})
    assert eight == Settings(num_nodes=8)
    cluster.remove(recorded)
    assert not recorded.state.exists()


def test_unknown_node_and_missing_or_stopped_cluster_are_errors(recorded: Layout, as_root: None) -> None:
    nothing = Layout(recorded.state / "nothing")
    assert (cluster.status(nothing), cluster.status(nothing).is_up) == (Status(None), False)
    with pytest.raises(DevClusterError, match=r"no dev cluster in .*: `hpcdist devcluster up` creates one"):
        cluster.kill_node(nothing, "n1")
    with pytest.raises(DevClusterError, match="no node 'n3' in the dev cluster: it has n1, n2"):
        cluster.kill_node(recorded, "n3")
    with pytest.raises(DevClusterError, match=r"the dev cluster in .* is not running: `hpcdist devcluster up`"):
        cluster.start_node(recorded, "n1")
    with pytest.raises(DevClusterError, match="--rate-mbit must be > 0, got 0"):
        cluster.slow_node(recorded, "n1", rate_mbit=0.0)


# --- Configuration files and commands that depend on the settings.


LAYOUT = Layout(Path("/var/lib/dc"))
BLOCK = """\
# >>> hpcdist devcluster: removed by `hpcdist devcluster down`
10.213.77.1 n1
10.213.77.2 n2
10.213.77.254 devcluster-head
10.213.77.253 devcluster-host
# <<< hpcdist devcluster
"""


def test_removed_hosts_block_restores_the_text() -> None:
    for text in ("", "127.0.0.1 a\n\n"):
        added = with_hosts_block(text, TWO)
        assert added == text + BLOCK
        assert without_hosts_block(added) == without_hosts_block(text) == text
        assert without_hosts_block(added + "10.0.0.1 other\n") == text + "10.0.0.1 other\n"
    assert with_hosts_block("127.0.0.1 no_line_break", TWO) == "127.0.0.1 no_line_break\n" + BLOCK
    assert with_hosts_block(with_hosts_block("", Settings(num_nodes=7)), TWO) == BLOCK
    taken = "10.0.0.7 n2 n9 # n1\n# 10.0.0.8 n1\n10.0.0.9 devcluster-head.\n"
    assert taken_names(with_hosts_block(taken, TWO), TWO) == ["n2"]


def test_nodes_report_cores_memory_and_fake_gpus() -> None:
    assert "NodeName=n[1-2] CPUs=8 RealMemory=32768 Gres=gpu:a100:2\n" in slurm_conf(TWO, LAYOUT)
    assert gres_conf(TWO, LAYOUT) == "NodeName=n[1-2] Name=gpu Type=a100 File=/var/lib/dc/gpus/gpu[0-1]\n"


def test_describe_status() -> None:
    idle, dead = NodeStatus("n1", "10.213.77.1", "idle", "none"), NodeStatus("n2", "10.213.77.2", "down*", "no answer")
    with_runtime = replace(TWO, runtime="apptainer")
    text = list(describe(Status(with_runtime, (idle, dead), dead=("slurmd-n2",), controller_answers=True), LAYOUT))
    assert text[0] == "not running: slurmd-n2; `hpcdist devcluster up` starts what is missing"
    assert text[3] == "n2    10.213.77.2      down*       no answer"
    assert "  export PATH=/var/lib/dc/bin:$PATH" in text
    assert list(describe(Status(TWO), LAYOUT)) == ["slurmctld does not answer: see /var/lib/dc/log/slurmctld.log"]
    assert list(describe(Status(None), LAYOUT)) == [
        "no dev cluster in /var/lib/dc: `hpcdist devcluster up --nodes 4` makes one"
    ]
