"""The dev cluster without root: its errors, configuration files and commands."""

import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from hpcdist.devcluster import (
    cluster,
    cluster_cgroup,
    cluster_commands,
    cluster_processes,
    cluster_status,
    host,
    runtime_scripts,
)
from hpcdist.devcluster.cluster_status import NodeStatus, Status, describe
from hpcdist.devcluster.node_faults import kill_node, slow_node, start_node
from hpcdist.devcluster.settings import (
    BARE_ENV,
    FURTHER_NETWORKS,
    Layout,
    Settings,
    gres_conf,
    head_batch,
    slurm_conf,
    slurmctld,
    taken_names,
    with_hosts_block,
    without_hosts_block,
)
from hpcdist.errors import DevClusterError

Patch = pytest.MonkeyPatch
LOCK = cluster_commands.LOCK
TWO = Settings(num_nodes=2)
SLURMCTLD = slurmctld(TWO)
#: The settings file of two nodes of an earlier version, without name, network and owner.
EARLIER = """{
  "num_nodes": 2,
  "proctrack": "cgroup",
  "runtime": "none",
  "pyxis_plugin": "/usr/local/lib/slurm/spank_pyxis.so"
}
"""
HOUR_S = 3600


@pytest.fixture
def layout() -> Iterator[Layout]:
    """A state folder with a short path, because paths of sockets are limited."""
    folder = Path(tempfile.mkdtemp(prefix="dc", dir="/tmp"))
    yield Layout(first=folder / "state")
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: Patch) -> None:
    """A separate lock: a dev cluster may be starting on this machine."""
    monkeypatch.setattr(cluster_commands, "LOCK", tmp_path / "lock")


def record(layout: Layout, text: str = TWO.to_json(), *, age_s: float = 3 * HOUR_S + 60) -> Layout:
    """Write the settings file of a cluster that is not running."""
    layout.state.mkdir(exist_ok=True)
    layout.settings_file.write_text(text)
    created = time.time() - age_s
    os.utime(layout.settings_file, (created, created))
    return layout


@pytest.fixture
def recorded(layout: Layout) -> Layout:
    """The state folder of a cluster of two nodes that is not running."""
    return record(layout)


@pytest.fixture
def second(layout: Layout) -> Layout:
    """The place of a second cluster beside the first."""
    return Layout("second", layout.first)


@pytest.fixture
def as_root(monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def test_truncated_settings_file_counts_as_no_cluster(recorded: Layout) -> None:
    assert cluster_status.recorded_settings(recorded) == TWO
    recorded.settings_file.write_text(TWO.to_json()[:-5])
    assert cluster_status.recorded_settings(recorded) is None
    for keys in ({"num_nodes": 2}, {**json.loads(TWO.to_json()), "key_of_a_later_version": 1}):
        with pytest.raises(ValueError, match="not the settings of a dev cluster of this version"):
            Settings.from_json(json.dumps(keys))


def test_commands_that_need_root_report_it(layout: Layout, monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    by_node = [partial(call, layout, "n1") for call in (kill_node, start_node, slow_node)]
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
        runtime_scripts.find_programs(settings, layout, env)  # the script of an earlier `up` is no program
    put_command(tmp_path / "apptainer", "true")
    assert runtime_scripts.find_programs(settings, layout, env)["apptainer"] == tmp_path / "apptainer"


def test_missing_plugin_of_pyxis_is_an_error(layout: Layout, tmp_path: Path) -> None:
    put_command(tmp_path / "enroot", "true")
    settings = replace(TWO, runtime="pyxis", pyxis_plugin=f"{tmp_path}/spank_pyxis.so")
    with pytest.raises(DevClusterError, match=r"--pyxis-plugin .*spank_pyxis.so: no such file: build pyxis"):
        runtime_scripts.find_programs(settings, layout, {"PATH": str(tmp_path)})
    (tmp_path / "spank_pyxis.so").touch()
    assert runtime_scripts.find_programs(settings, layout, {"PATH": str(tmp_path)}) == {"enroot": tmp_path / "enroot"}


#: Stands for a daemon of Slurm: the tests of Slurm, which may run at the same time, would refuse one of its real name.
DAEMON = "slurmfake"


@pytest.fixture
def foreign_daemon(tmp_path: Path, monkeypatch: Patch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that counts as a daemon of Slurm, in no dev cluster."""
    monkeypatch.setattr(host, "_SLURM_DAEMONS", (DAEMON,))
    sleep = shutil.which("sleep")
    assert sleep is not None
    shutil.copy(sleep, tmp_path / DAEMON)
    with subprocess.Popen([tmp_path / DAEMON, "60"]) as daemon:
        yield daemon
        daemon.kill()


@pytest.mark.processes
@pytest.mark.usefixtures("foreign_daemon")
def test_another_slurm_on_this_machine_is_an_error(layout: Layout) -> None:
    with pytest.raises(DevClusterError, match=rf"^{DAEMON} \(process \d+\) .* beside another Slurm"):
        host.refuse_beside_slurm(layout)


def test_cluster_without_usable_cgroups(layout: Layout, tmp_path: Path, monkeypatch: Patch) -> None:
    """In a container, for example. Then linuxproc is the default."""
    monkeypatch.setattr(cluster_cgroup, "ROOT", tmp_path / "absent")
    assert cluster._choose(layout, {}).proctrack == "linuxproc"
    host.require_cgroups(Settings(proctrack="linuxproc"))
    with pytest.raises(
        DevClusterError, match=r"--proctrack cgroup: root cannot create cgroups of version 1 in .*linuxproc, or"
    ):
        host.require_cgroups(cluster._choose(layout, {"proctrack": "cgroup"}))


def test_removed_cgroup_includes_those_below_it(recorded: Layout, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(cluster_cgroup, "ROOT", tmp_path)
    recorded.cgroups.mkdir()
    recorded.cgroup_name.write_text("own")
    for name in ("own/slurm_n1/uid_0/job_1", "own/slurm_n2", "other/slurm_n1"):
        (tmp_path / cluster_cgroup.FREEZER / name).mkdir(parents=True)
    cluster_cgroup.remove(recorded)
    assert os.listdir(tmp_path / cluster_cgroup.FREEZER) == ["other"]


def test_used_names_and_networks_are_errors(layout: Layout, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(host, "HOSTS", tmp_path / "hosts")
    host.HOSTS.write_text("10.0.0.1 n1\n")
    with pytest.raises(DevClusterError, match="hosts already names n1"):
        host.require_free_network(TWO, layout)
    host.HOSTS.write_text("")
    routes = f"10.213.77.0/24 dev {layout.link} proto kernel scope link src 10.213.77.253\n"
    monkeypatch.setattr(host, "LINKS", tmp_path)
    monkeypatch.setattr(host, "run", lambda command: routes)
    host.require_free_network(TWO, layout)
    routes += "10.213.77.0/25 dev tun0 scope link \n"
    with pytest.raises(
        DevClusterError, match=r"uses addresses of 10.213.77.0/24, .*: 10.213.77.0/25 dev tun0 scope link$"
    ):
        host.require_free_network(TWO, layout)


def test_link_of_a_running_cluster_is_not_to_be_deleted(layout: Layout, tmp_path: Path, monkeypatch: Patch) -> None:
    """A cluster of another container with the network of this machine: its link is here, its files are not."""
    monkeypatch.setattr(host, "HOSTS", tmp_path / "hosts")
    monkeypatch.setattr(host, "LINKS", tmp_path)
    host.HOSTS.touch()
    link = tmp_path / layout.link
    link.mkdir()
    for owner in ("an unknown dev cluster", "dev cluster hpcdist of ada"):
        error = rf"^interface hpcdist0 belongs to {owner} outside of .*: `hpcdist devcluster up --name NAME` starts a"
        with pytest.raises(DevClusterError, match=error) as raised:
            host.require_free_network(TWO, layout)
        assert "delete" not in str(raised.value)
        (link / "ifalias").write_text("dev cluster hpcdist of ada\n")


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


def test_install_needs_apt_get_and_no_other_slurm(bare_machine: Path) -> None:
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
def test_failed_command_is_reported_with_its_error(monkeypatch: Patch) -> None:
    with pytest.raises(DevClusterError, match=r"^`sh -c 'echo first; echo last >&2; exit 3'` failed: last$"):
        cluster_commands.run(["sh", "-c", "echo first; echo last >&2; exit 3"])
    mariadb = "echo '1:56 0 [ERROR] no space' >&2; echo '1:56 0 [ERROR] Aborting' >&2; exit 1"
    with pytest.raises(DevClusterError, match=r" failed: 1:56 0 \[ERROR\] no space$"):
        cluster_commands.run(["sh", "-c", mariadb])
    with pytest.raises(DevClusterError, match=r"`false` failed: exit code 1$"):
        cluster_commands.run(["false"])
    with pytest.raises(DevClusterError, match=r"^no-such-command not found: is the package"):
        cluster_commands.run(["no-such-command"])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "SLURM_JOB_ID" not in cluster_commands.run(["env"], env={"SLURM_CONF": "/x"}), "no variables of the caller"
    assert "SLURM_CONF=/x\n" in cluster_commands.run(["env"], env={"SLURM_CONF": "/x"})


def test_exclusive_lock_of_root_allows_one_command_at_a_time(monkeypatch: Patch) -> None:
    assert LOCK.parent.stat().st_uid == 0
    assert not LOCK.parent.stat().st_mode & 0o022
    monkeypatch.setattr(cluster_commands, "LOCK_WITHIN_S", 0.1)
    with cluster_commands.exclusive(), pytest.raises(DevClusterError, match="another `hpcdist devcluster` is at work"):
        cluster_commands.exclusive().__enter__()
    with cluster_commands.exclusive():
        pass


@pytest.mark.processes
def test_failed_wait_for_a_daemon_shows_its_last_output(recorded: Layout) -> None:
    recorded.logs.mkdir()
    recorded.run.mkdir()
    recorded.output("slurmctld").write_text("starting\nfatal: no such thing\n")
    with pytest.raises(DevClusterError, match=r"^it is silent within 0 s; .*slurmctld.out ends with: fatal: no such"):
        cluster_commands.wait_until(lambda: False, "it is silent", recorded, SLURMCTLD, 0)
    recorded.output("slurmctld").write_text("")
    ended = subprocess.Popen(["true"])
    ended.wait()
    recorded.pid_file("slurmctld").write_text(str(ended.pid))
    with pytest.raises(DevClusterError, match=r"^slurmctld ended at once; .* ends with: nothing"):
        cluster_commands.wait_until(lambda: False, "it is silent", recorded, SLURMCTLD, 60)


def test_stale_pid_file_is_ignored(recorded: Layout, monkeypatch: Patch, as_root: None) -> None:
    recorded.run.mkdir()
    recorded.pid_file("slurmctld").write_text(str(os.getpid()))
    assert not cluster_processes.is_running(recorded, SLURMCTLD)
    own = os.stat("/proc/self/ns/net")
    monkeypatch.setattr(cluster_processes, "mounted_namespaces", lambda layout: {TWO.head: (own.st_dev, own.st_ino)})
    assert cluster_processes.is_running(recorded, SLURMCTLD)


def test_remains_of_a_crash_are_removed(recorded: Layout) -> None:
    recorded.conf.mkdir()
    assert cluster._choose(recorded, {}) == TWO
    eight = cluster._choose(recorded, {"num_nodes": 8})
    assert eight == Settings(num_nodes=8)
    cluster.remove(recorded)
    assert not recorded.state.exists()


def test_unknown_node_and_missing_or_stopped_cluster_are_errors(recorded: Layout, as_root: None) -> None:
    nothing = Layout(first=recorded.state / "nothing")
    assert (cluster_status.status(nothing), cluster_status.status(nothing).is_up) == (Status(None), False)
    with pytest.raises(DevClusterError, match=r"no dev cluster in .*: `hpcdist devcluster up` creates one"):
        kill_node(nothing, "n1")
    with pytest.raises(DevClusterError, match="no node 'n3' in the dev cluster: it has n1, n2"):
        kill_node(recorded, "n3")
    with pytest.raises(DevClusterError, match=r"the dev cluster in .* is not running: `hpcdist devcluster up`"):
        start_node(recorded, "n1")
    with pytest.raises(DevClusterError, match="--rate-mbit must be > 0, got 0"):
        slow_node(recorded, "n1", rate_mbit=0.0)


# --- Several clusters and several users.


def test_second_cluster_shares_no_name_with_the_first(layout: Layout, second: Layout) -> None:
    names = [
        {one.link, str(one.state), settings.name, settings.network, *settings.addresses, *settings.addresses.values()}
        for one, settings in (
            (layout, Settings(num_nodes=250)),
            (second, Settings(num_nodes=250, name="second", network=FURTHER_NETWORKS[0])),
        )
    ]
    assert names[0].isdisjoint(names[1])
    assert names[0] >= {"hpcdist0", "n1", "n250", "devcluster-head", "devcluster-host", "hpcdist", "10.213.77.1"}
    assert names[1] >= {"hpcd-second", "second-n1", "second-devcluster-head", "second", "10.213.78.1"}
    assert Layout().state == Path("/var/lib/hpcdist-devcluster")
    assert Layout("second").state == Path("/var/lib/hpcdist-devcluster-second")


def test_longest_name_fits_into_names_of_interfaces() -> None:
    longest = Layout("a123456789")
    words = head_batch(Settings(num_nodes=250, name=longest.name), longest).split()
    added = [name for word, name in itertools.pairwise(words) if word == "add"]
    assert max(map(len, [longest.link, *(name for name in added if "." not in name)])) == 15
    for name in ("", "a1234567890", "1a", "A", "a-b", "a/b", "a\n"):
        with pytest.raises(DevClusterError, match=r"^--name .*: the name of a dev cluster has at most 10 lower-case"):
            Layout(name)


def test_second_cluster_gets_the_first_free_network(second: Layout, monkeypatch: Patch) -> None:
    routed = {FURTHER_NETWORKS[0]}
    monkeypatch.setattr(host, "routes", lambda network: ["a route"] if network in routed else [])
    record(Layout("third", second.first), Settings(name="third", network=FURTHER_NETWORKS[1]).to_json())
    settings = cluster._choose(second, {"num_nodes": 1})
    assert (settings.name, settings.network) == ("second", FURTHER_NETWORKS[2])
    routed.update(FURTHER_NETWORKS)
    with pytest.raises(DevClusterError, match=r"^no network is free .* use 10.213.78.0/24 to 10.213.93.0/24$"):
        cluster._choose(second, {})
    record(second, settings.to_json())
    assert cluster._choose(second, {}) == settings, "its own route does not matter"


@pytest.fixture
def no_daemons(monkeypatch: Patch, as_root: None, tmp_path: Path) -> None:
    """`up` writes the settings file only."""
    names = ("refuse_beside_slurm", "require_commands", "require_namespaces", "require_cgroups")
    for name in (*names, "require_free_network"):
        monkeypatch.setattr(host, name, lambda *arguments: None)
    monkeypatch.setattr(runtime_scripts, "write_scripts", lambda *arguments: None)
    monkeypatch.setattr(cluster_cgroup, "create", lambda *arguments: None)
    for name in ("make_network", "write_files", "_start_daemons"):
        monkeypatch.setattr(cluster, name, lambda *arguments: None)
    monkeypatch.setattr(host, "routes", lambda network: [])
    monkeypatch.setattr(host, "HOSTS", tmp_path / "hosts")
    host.HOSTS.touch()


@pytest.mark.usefixtures("no_daemons")
def test_up_refuses_a_cluster_of_another_user(layout: Layout, second: Layout, monkeypatch: Patch) -> None:
    cluster.up(layout, {}, env={"SUDO_USER": "ada"})
    record(layout, layout.settings_file.read_text())
    text, hosts = layout.settings_file.read_text(), host.HOSTS.read_text()
    begins = "dev cluster hpcdist of ada, created 3 h 1 min ago, is not a cluster of "
    for env, user in (({"SUDO_USER": "bob"}, "bob"), ({}, "root")):
        with pytest.raises(DevClusterError, match=rf"^{begins}{user}: `hpcdist devcluster up --name NAME` starts"):
            cluster.up(layout, {"num_nodes": 7}, env=env)
    assert (layout.settings_file.read_text(), host.HOSTS.read_text()) == (text, hosts)
    assert cluster.up(layout, {}, env={"SUDO_USER": "ada"}).owner == "ada"
    assert layout.settings_file.read_text() == text
    cluster.up(second, {}, env={"SUDO_USER": "bob"})
    with pytest.raises(DevClusterError, match=r"^dev cluster second of bob, .*`hpcdist devcluster down --name second`"):
        cluster.up(second, {}, env={})
    assert cluster.caller({}) == "root"


@pytest.mark.usefixtures("no_daemons")
def test_running_cluster_of_an_earlier_version_is_kept(layout: Layout, monkeypatch: Patch) -> None:
    later = json.dumps({**json.loads(TWO.to_json()), "key_of_a_later_version": 1})
    error = r"^dev cluster hpcdist of an unknown user, created 3 h 1 min ago, is not a cluster of root: "
    with monkeypatch.context() as patch:
        patch.setattr(cluster_processes, "members", lambda namespaces: [1])
        for text in (EARLIER, later):
            record(layout, text)
            with pytest.raises(DevClusterError, match=error):
                cluster.up(layout, {}, env={})
            assert layout.settings_file.read_text() == text
    record(layout, EARLIER)
    layout.database.mkdir()
    settings = cluster.up(layout, {}, env={})
    assert (settings.num_nodes, settings.owner, layout.database.exists()) == (2, "root", True)
    assert '"owner": "root"' in layout.settings_file.read_text()
    record(layout, later)
    assert cluster.up(layout, {}, env={}).num_nodes == 4, "the remains of a crash"
    assert not layout.database.exists()


@pytest.mark.processes
def test_slurm_of_another_dev_cluster_is_accepted(
    layout: Layout, second: Layout, foreign_daemon: subprocess.Popen[bytes], monkeypatch: Patch
) -> None:
    status = os.stat(f"/proc/{foreign_daemon.pid}/ns/net")
    namespaces = {layout.name: (4, 1), second.name: (status.st_dev, status.st_ino)}
    monkeypatch.setattr(cluster_processes, "mounted_namespaces", lambda layout: {layout.name: namespaces[layout.name]})
    with pytest.raises(DevClusterError, match=rf"{DAEMON} .* does not belong to a dev cluster in /tmp/dc"):
        host.refuse_beside_slurm(layout)
    record(second)
    host.refuse_beside_slurm(layout)


@pytest.mark.processes
def test_daemon_that_starts_during_the_search_is_accepted(
    recorded: Layout, foreign_daemon: subprocess.Popen[bytes], monkeypatch: Patch
) -> None:
    """The namespace of a cluster is mounted, and then its daemon starts, just before the processes are listed."""
    status = os.stat(f"/proc/{foreign_daemon.pid}/ns/net")
    mounted: dict[str, tuple[int, int]] = {}

    def started() -> list[int]:
        mounted[recorded.name] = (status.st_dev, status.st_ino)
        return [foreign_daemon.pid]

    monkeypatch.setattr("psutil.pids", started)
    monkeypatch.setattr(cluster_processes, "mounted_namespaces", lambda layout: dict(mounted))
    host.refuse_beside_slurm(recorded)
    assert mounted, "the search has listed the daemon"
    monkeypatch.setattr(cluster_processes, "mounted_namespaces", lambda layout: {})
    with pytest.raises(DevClusterError, match=DAEMON):
        host.refuse_beside_slurm(recorded)


@pytest.mark.processes
def test_down_has_reasons_to_ask(recorded: Layout, second: Layout, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setitem(BARE_ENV, "PATH", f"{tmp_path}:/usr/bin:/bin")
    record(recorded, replace(TWO, owner="ada").to_json())
    put_command(tmp_path / "scontrol", "exit 1")
    put_command(tmp_path / "squeue", "exit 1")
    foreign, unknown = "it is not a cluster of bob", "Slurm does not answer whether it has jobs"
    assert cluster.reasons_to_ask(recorded, "ada") == cluster.reasons_to_ask(second, "ada") == []
    assert cluster.reasons_to_ask(recorded, "bob") == [foreign]
    monkeypatch.setattr(cluster_processes, "members", lambda namespaces: [1])
    recorded.controller.mkdir()
    assert cluster.reasons_to_ask(recorded, "ada") == [], "`up` was killed before it started slurmctld"
    (recorded.controller / "clustername").touch()
    assert cluster.reasons_to_ask(recorded, "ada") == [unknown]
    put_command(tmp_path / "scontrol", "exit 0")
    assert cluster.reasons_to_ask(recorded, "ada") == [unknown]
    put_command(tmp_path / "squeue", "")
    assert cluster.reasons_to_ask(recorded, "ada") == []
    rows = "'RUNNING|ada' 'PENDING|bob' 'PENDING|ada' 'COMPLETING|eve'"
    put_command(tmp_path / "squeue", f"printf '%s\\n' {rows}")
    assert cluster.reasons_to_ask(recorded, "ada") == ["its 2 jobs of ada would end", "its 1 job of bob would end"]
    assert cluster.reasons_to_ask(recorded, "bob")[0] == foreign
    record(recorded, EARLIER)
    put_command(tmp_path / "squeue", "")
    assert cluster.reasons_to_ask(recorded, "ada") == ["it is not a cluster of ada"], "its owner is not known"


@pytest.mark.processes
def test_status_names_owner_age_and_the_other_clusters(
    recorded: Layout, second: Layout, tmp_path: Path, monkeypatch: Patch
) -> None:
    put_command(tmp_path / "scontrol", "exit 1")
    monkeypatch.setitem(BARE_ENV, "PATH", f"{tmp_path}:/usr/bin:/bin")
    third = Layout("third", second.first)
    record(second, replace(TWO, name="second", owner="ada").to_json())
    record(third, replace(TWO, name="third").to_json(), age_s=2 * HOUR_S)
    second.first.with_name(f"{second.first.name}-no_name").mkdir()
    found = cluster_status.status(second)
    assert found.summary == "dev cluster second of ada, created 3 h 1 min ago"
    assert found.others == (
        "dev cluster hpcdist of an unknown user, created 3 h 1 min ago: `hpcdist devcluster status`",
        "dev cluster third of an unknown user, created 2 h ago: `hpcdist devcluster status --name third`",
    )


# --- Configuration files and commands that depend on the settings.


LAYOUT = Layout(first=Path("/var/lib/dc"))
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
        added = with_hosts_block(text, TWO, LAYOUT)
        assert added == text + BLOCK
        assert without_hosts_block(added, LAYOUT) == without_hosts_block(text, LAYOUT) == text
        assert without_hosts_block(added + "10.0.0.1 other\n", LAYOUT) == text + "10.0.0.1 other\n"
    assert with_hosts_block("127.0.0.1 no_line_break", TWO, LAYOUT) == "127.0.0.1 no_line_break\n" + BLOCK
    assert with_hosts_block(with_hosts_block("", Settings(num_nodes=7), LAYOUT), TWO, LAYOUT) == BLOCK
    taken = "10.0.0.7 n2 n9 # n1\n# 10.0.0.8 n1\n10.0.0.9 devcluster-head.\n"
    assert taken_names(with_hosts_block(taken, TWO, LAYOUT), TWO, LAYOUT) == ["n2"]


def test_hosts_blocks_of_two_clusters_are_independent() -> None:
    place, settings = Layout("b"), Settings(num_nodes=1, name="b", network="10.213.78.0/24")
    block = """\
# >>> hpcdist devcluster b: removed by `hpcdist devcluster down --name b`
10.213.78.1 b-n1
10.213.78.254 b-devcluster-head
10.213.78.253 b-devcluster-host
# <<< hpcdist devcluster b
"""
    both = with_hosts_block(BLOCK, settings, place)
    assert both == BLOCK + block
    assert without_hosts_block(both, LAYOUT) == block
    assert without_hosts_block(both, place) == BLOCK
    assert taken_names(both, settings, place) == taken_names(both, TWO, LAYOUT) == []


def test_nodes_report_cores_memory_and_fake_gpus() -> None:
    assert "NodeName=n[1-2] CPUs=8 RealMemory=32768 Gres=gpu:a100:2\n" in slurm_conf(TWO, LAYOUT)
    assert gres_conf(TWO, LAYOUT) == "NodeName=n[1-2] Name=gpu Type=a100 File=/var/lib/dc/gpus/gpu[0-1]\n"


def test_describe_status() -> None:
    idle, dead = NodeStatus("n1", "10.213.77.1", "idle", "none"), NodeStatus("n2", "10.213.77.2", "down*", "no answer")
    with_runtime = replace(TWO, runtime="apptainer")
    found = Status(
        with_runtime, (idle, dead), ("slurmd-n2",), controller_answers=True, summary="of ada", others=("one",)
    )
    text = list(describe(found, LAYOUT))
    assert text[:2] == ["of ada", "not running: slurmd-n2; `hpcdist devcluster up` starts the missing parts"]
    assert text[4] == "n2    10.213.77.2      down*       no answer"
    assert "  export PATH=/var/lib/dc/bin:$PATH" in text
    assert text[-1] == "another one"
    assert list(describe(Status(TWO, summary="of ada"), LAYOUT)) == [
        "of ada",
        "slurmctld does not answer: see /var/lib/dc/log/slurmctld.log",
    ]
    assert list(describe(Status(None, others=("one",)), Layout("b", LAYOUT.first))) == [
        "no dev cluster in /var/lib/dc-b: `hpcdist devcluster up --nodes 4 --name b` makes one",
        "another one",
    ]
