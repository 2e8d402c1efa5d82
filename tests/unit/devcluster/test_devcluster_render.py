"""Configuration files and commands of the dev cluster, compared as a whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.devcluster import host
from hpcdist.devcluster import settings as devcluster_settings
from hpcdist.devcluster.cluster import NodeStatus, Status, describe
from hpcdist.devcluster.settings import HEAD, Layout, Settings

LAYOUT = Layout(Path("/var/lib/dc"))
TWO = Settings(num_nodes=2, cpus_per_node=4, gpus_per_node=2, memory_mb=1000, grace_time_s=20)
ONE = Settings(num_nodes=1, gpus_per_node=1)
BARE = Settings(num_nodes=3, gpus_per_node=0)


def test_slurm_conf() -> None:
    assert (
        devcluster_settings.slurm_conf(TWO, LAYOUT)
        == """\
# Written by `hpcdist devcluster up`; changes are lost.
ClusterName=hpcdist
SlurmUser=root
SlurmctldHost=devcluster-head(10.213.77.254)
SlurmctldPort=16817
SlurmdPort=16818
CommunicationParameters=NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket=/var/lib/dc/munge/socket
StateSaveLocation=/var/lib/dc/slurmctld
SlurmdSpoolDir=/var/lib/dc/spool/%n
SlurmctldPidFile=/var/lib/dc/run/slurm-slurmctld.pid
SlurmdPidFile=/var/lib/dc/run/slurm-slurmd-%n.pid
SlurmctldLogFile=/var/lib/dc/log/slurmctld.log
SlurmdLogFile=/var/lib/dc/log/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/cgroup
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Nodes may claim more than this machine has.
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=15
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=10.213.77.254
AccountingStoragePort=16819
AccountingStoragePass=/var/lib/dc/munge/socket
AccountingStorageEnforce=associations
AccountingStorageTRES=gres/gpu
NodeName=n[1-2] CPUs=4 RealMemory=1000 Gres=gpu:2
PartitionName=main Nodes=n[1-2] Default=YES PriorityTier=1 GraceTime=20 DefaultTime=01:00:00 MaxTime=1-00:00:00
PartitionName=high Nodes=n[1-2] PriorityTier=10 PreemptMode=OFF DefaultTime=01:00:00 MaxTime=1-00:00:00
"""
    )


def test_single_node_is_not_a_range() -> None:
    text = devcluster_settings.slurm_conf(ONE, LAYOUT)
    assert "NodeName=n1 CPUs=8 RealMemory=32768 Gres=gpu:1\n" in text
    assert "PartitionName=main Nodes=n1 Default=YES" in text


def test_gres_conf_names_a_device_for_each_gpu() -> None:
    assert devcluster_settings.gres_conf(TWO, LAYOUT) == "NodeName=n[1-2] Name=gpu File=/var/lib/dc/gpus/gpu[0-1]\n"
    assert devcluster_settings.gres_conf(ONE, LAYOUT) == "NodeName=n1 Name=gpu File=/var/lib/dc/gpus/gpu0\n"


def test_configuration_without_gpus() -> None:
    assert devcluster_settings.gres_conf(BARE, LAYOUT) == ""
    assert "NodeName=n[1-3] CPUs=8 RealMemory=32768\n" in devcluster_settings.slurm_conf(BARE, LAYOUT)


def test_cgroup_conf() -> None:
    assert (
        devcluster_settings.cgroup_conf(TWO, LAYOUT) == "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/var/lib/dc/cgroup\n"
    )
    without = Settings(num_nodes=2, proctrack="linuxproc")
    assert "ProctrackType=proctrack/linuxproc\n" in devcluster_settings.slurm_conf(without, LAYOUT)
    assert devcluster_settings.cgroup_conf(without, LAYOUT) == "CgroupPlugin=cgroup/v1\n"


def test_slurmdbd_conf() -> None:
    assert (
        devcluster_settings.slurmdbd_conf(TWO, LAYOUT, "secret")
        == """\
AuthType=auth/munge
AuthInfo=socket=/var/lib/dc/munge/socket
DbdHost=devcluster-head
DbdAddr=10.213.77.254
DbdPort=16819
CommunicationParameters=NoInAddrAny
SlurmUser=root
PidFile=/var/lib/dc/run/slurm-slurmdbd.pid
LogFile=/var/lib/dc/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=secret
StorageLoc=slurm
"""
    )


def test_database_sql() -> None:
    assert (
        devcluster_settings.database_sql("secret")
        == """\
CREATE DATABASE IF NOT EXISTS slurm;
CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED BY 'secret';
GRANT ALL ON slurm.* TO slurm@localhost;
"""
    )


BLOCK = """
# >>> hpcdist devcluster: removed by `hpcdist devcluster down`
10.213.77.1 n1
10.213.77.2 n2
10.213.77.254 devcluster-head
10.213.77.253 devcluster-host
# <<< hpcdist devcluster
"""


@pytest.mark.parametrize("text", ["", "127.0.0.1 localhost\n", "127.0.0.1 localhost", "127.0.0.1 a\n\n", "\n"])
def test_removed_hosts_block_restores_the_original_text(text: str) -> None:
    added = devcluster_settings.with_hosts_block(text, TWO)
    assert added == text + BLOCK
    assert devcluster_settings.without_hosts_block(added) == text
    assert devcluster_settings.without_hosts_block(text) == text


@pytest.mark.parametrize("text", ["127.0.0.1 localhost\n", "127.0.0.1 localhost"])
def test_removed_hosts_block_keeps_later_lines(text: str) -> None:
    extended = devcluster_settings.with_hosts_block(text, TWO) + "10.0.0.1 other\n"
    assert devcluster_settings.without_hosts_block(extended) == "127.0.0.1 localhost\n10.0.0.1 other\n"


def test_hosts_block_replaces_an_older_one() -> None:
    once = devcluster_settings.with_hosts_block("127.0.0.1 localhost\n", Settings(num_nodes=7))
    assert devcluster_settings.with_hosts_block(once, TWO) == "127.0.0.1 localhost\n" + BLOCK


def test_taken_names_are_those_outside_the_block() -> None:
    text = "10.0.0.7 n2 n9 # n1\n# 10.0.0.8 n1\n10.0.0.9 devcluster-head.\n"
    assert devcluster_settings.taken_names(devcluster_settings.with_hosts_block(text, TWO), TWO) == ["n2"]


def test_links_of_the_head() -> None:
    assert (
        devcluster_settings.head_batch(TWO, LAYOUT)
        == """\
link set lo up
link add br0 type bridge
addr add 10.213.77.254/24 dev br0
link set br0 up
link set host master br0 up
link add n1 type veth peer name eth0 netns /var/lib/dc/netns/n1
link set n1 master br0 up
link add n2 type veth peer name eth0 netns /var/lib/dc/netns/n2
link set n2 master br0 up
"""
    )


def test_links_of_host_and_node() -> None:
    assert (
        devcluster_settings.host_batch(TWO, LAYOUT)
        == """\
link add hpcdist0 type veth peer name host netns /var/lib/dc/netns/devcluster-head
addr add 10.213.77.253/24 dev hpcdist0
link set hpcdist0 up
"""
    )
    assert (
        devcluster_settings.node_batch(TWO, "n2")
        == "link set lo up\naddr add 10.213.77.2/24 dev eth0\nlink set eth0 up\n"
    )


def test_daemon_has_the_network_and_host_name_of_its_node() -> None:
    command = [
        *("setsid", "--fork", "nsenter", "--net=/var/lib/dc/netns/n2", "unshare", "--uts", "sh", "-c"),
        'hostname "$0" && cd / && umask 022 && echo $$ > "$1" && shift && exec "$@"',
        *("n2", "/var/lib/dc/run/slurmd-n2.pid", "slurmd", "-D", "-N", "n2"),
    ]
    assert devcluster_settings.daemon(LAYOUT, devcluster_settings.slurmd("n2")) == command
    command[6:6] = ["--mount", "--propagation=slave"]
    assert devcluster_settings.daemon(LAYOUT, devcluster_settings.slurmd("n2", own_mounts=True)) == command


def test_daemons_start_after_their_dependencies() -> None:
    found = devcluster_settings.daemons(TWO, LAYOUT)
    assert [(daemon.name, daemon.node) for daemon in found] == [
        *(("munged", HEAD), ("mariadbd", HEAD), ("slurmdbd", HEAD), ("slurmctld", HEAD)),
        *(("slurmd-n1", "n1"), ("slurmd-n2", "n2")),
    ]
    with_docker = devcluster_settings.daemons(replace(TWO, runtime="docker"), LAYOUT)
    assert [daemon.name for daemon in with_docker[4:]] == ["dockerd-n1", "dockerd-n2", "slurmd-n1", "slurmd-n2"]


def test_munge_and_mariadb_use_only_files_of_the_cluster() -> None:
    assert devcluster_settings.munged(LAYOUT).argv == (
        *("setpriv", "--reuid=munge", "--regid=munge", "--init-groups"),
        *("munged", "--foreground", "--num-threads=10", "--socket", "/var/lib/dc/munge/socket"),
        *("--key-file", "/var/lib/dc/munge/key", "--pid-file", "/var/lib/dc/munge/pid"),
        *("--seed-file", "/var/lib/dc/munge/seed"),
    )
    assert devcluster_settings.mariadbd(LAYOUT).argv == (
        *("mariadbd", "--no-defaults", "--user=mysql", "--skip-networking", "--datadir=/var/lib/dc/mariadb"),
        *("--socket=/var/lib/dc/mariadb-run/socket", "--pid-file=/var/lib/dc/mariadb-run/pid"),
        *("--init-file=/var/lib/dc/mariadb-run/init.sql", "--innodb-buffer-pool-size=64M"),
        *("--innodb-log-file-size=8M", "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0"),
        *("--innodb-flush-method=nosync", "--skip-innodb-doublewrite"),
    )
    assert devcluster_settings.install_database(Path("/var/lib/dc/mariadb-new")) == [
        *("mariadb-install-db", "--no-defaults", "--datadir=/var/lib/dc/mariadb-new", "--user=mysql"),
        *("--auth-root-authentication-method=socket", "--skip-test-db", "--skip-name-resolve"),
    ]


def test_environment_of_daemons() -> None:
    assert devcluster_settings.daemon_env(LAYOUT) == {
        "PATH": "/var/lib/dc/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "SLURM_CONF": "/var/lib/dc/conf/slurm.conf",
        "MYSQL_UNIX_PORT": "/var/lib/dc/mariadb-run/socket",
    }


def test_command_on_a_node() -> None:
    assert devcluster_settings.on_node(LAYOUT, "n1", ["hostname", "-i"]) == [
        *("nsenter", "--net=/var/lib/dc/netns/n1", "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', "n1"),
        *("hostname", "-i"),
    ]


@pytest.mark.parametrize(
    ("rate_mbit", "delay_ms", "expected"),
    [
        (10, None, "tbf rate 10mbit burst 128kb latency 400ms"),
        (None, 2.5, "netem delay 2.5ms"),
        (0.5, 100, "netem delay 100ms rate 0.5mbit"),
    ],
)
def test_slow_link(rate_mbit: float | None, delay_ms: float | None, expected: str) -> None:
    assert " ".join(devcluster_settings.slow_link(rate_mbit, delay_ms)) == expected


def test_describe_status() -> None:
    idle, dead = NodeStatus("n1", "10.213.77.1", "idle", "none"), NodeStatus("n2", "10.213.77.2", "down*", "no answer")
    assert list(describe(Status(TWO, (idle, dead), dead=("slurmd-n2",), controller_answers=True), LAYOUT)) == [
        "not running: slurmd-n2; `hpcdist devcluster up` starts what is missing",
        "node  address          state       reason",
        "n1    10.213.77.1      idle        none",
        "n2    10.213.77.2      down*       no answer",
        "each node claims 4 CPUs, 2 fake GPUs, 1000 MiB",
        "processes are tracked and signalled by proctrack/cgroup",
        "partitions: main (default), high (preempts jobs of main: they are requeued, GraceTime 20 s)",
        "the nodes reach this machine as devcluster-host (10.213.77.253); logs are in /var/lib/dc/log",
        "use it:",
        "  export SLURM_CONF=/var/lib/dc/conf/slurm.conf",
        "  srun --nodes=2 hostname",
    ]
    assert list(describe(Status(TWO), LAYOUT)) == ["slurmctld does not answer: see /var/lib/dc/log/slurmctld.log"]
    assert list(describe(Status(None), LAYOUT)) == [
        "no dev cluster in /var/lib/dc: `hpcdist devcluster up --nodes 4` makes one"
    ]


def test_docker_daemon_of_a_node() -> None:
    assert devcluster_settings.dockerd(LAYOUT, "n2").argv == (
        *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--propagation=slave"),
        *("/var/lib/dc/bin/dockerd", "--host=unix:///var/lib/dc/docker/n2.sock", "--pidfile=/var/lib/dc/docker/n2.pid"),
        *("--exec-root=/var/lib/dc/docker/n2", "--data-root=/var/lib/dc/docker-images/n2", "--bridge=none"),
        *("--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"),
    )


HEADER = "#!/bin/sh\n# Written by `hpcdist devcluster up`; changes are lost.\n"


def scripts(runtime: str, *names: str, may_raise_limits: bool = True) -> dict[str, str]:
    programs = {name: Path("/opt/bin", name) for name in names}
    settings = replace(TWO, runtime=runtime)
    found = host.scripts(settings, LAYOUT, programs, may_raise_limits=may_raise_limits)
    assert all(text.startswith("#!/bin/sh\n") for text in found.values())
    return {name: text.removeprefix(HEADER) for name, text in found.items()}


def test_cluster_without_a_runtime_has_no_scripts() -> None:
    assert scripts("none") == {}


def test_script_of_apptainer_drops_the_capability_that_root_lacks() -> None:
    run = 'exec /opt/bin/apptainer "$@"\n'
    assert scripts("apptainer", "apptainer") == {"apptainer": run}
    drop = '[ "$(id -u)" != 0 ] || export APPTAINER_DROP_CAPS="${APPTAINER_DROP_CAPS:-CAP_SYS_RESOURCE}"\n'
    assert scripts("apptainer", "apptainer", may_raise_limits=False) == {"apptainer": drop + run}


def test_script_of_docker_selects_the_daemon_of_its_node() -> None:
    names = ("dockerd", "docker", "containerd", "runc")
    client = (
        "socket=/var/lib/dc/docker/$(hostname).sock\n"
        '[ -S "$socket" ] || socket=/var/lib/dc/docker/n1.sock # this machine is no node\n'
        'DOCKER_HOST=unix://$socket exec /opt/bin/docker "$@"\n'
    )
    daemon = 'PATH=/opt/bin:$PATH exec /opt/bin/dockerd "$@"\n'
    assert scripts("docker", *names) == {"docker": client, "dockerd": daemon}
    limited = scripts("docker", *names, may_raise_limits=False)
    runtime = " --add-runtime=within-limits=/var/lib/dc/bin/within-limits --default-runtime=within-limits"
    assert limited["dockerd"] == daemon.replace("/dockerd", f"/dockerd{runtime}")
    assert limited["within-limits"].endswith('exec runc "$@"\n')


def test_script_of_enroot_keeps_the_containers_of_nodes_and_users_apart() -> None:
    paths = "ENROOT_DATA_PATH=$own/data ENROOT_RUNTIME_PATH=$own/runtime ENROOT_CACHE_PATH=$own/cache"
    script = (
        f'own=/var/lib/dc/enroot/$(hostname)-$(id -u)\nexport PATH=$PATH:/opt/bin {paths}\nexec /opt/bin/enroot "$@"\n'
    )
    assert scripts("pyxis", "enroot") == {"enroot": script}
    settings = replace(TWO, runtime="pyxis", pyxis_plugin="/opt/spank_pyxis.so")
    expected = "required /opt/spank_pyxis.so runtime_path=/var/lib/dc/pyxis\n"
    assert host.plugstack_conf(settings, LAYOUT) == expected


@pytest.mark.parametrize(
    ("runtime", "lines"),
    [
        ("none", []),
        (
            "docker",
            [
                "containers: submit with container.runtime=docker container.image=NAME",
                "  export PATH=/var/lib/dc/bin:$PATH",
                "  srun --nodes=2 --ntasks-per-node=1 docker load --input FILE.tar    # each node has its own images",
            ],
        ),
        (
            "pyxis",
            [
                "containers: submit with container.runtime=pyxis container.image=FILE.sqsh",
                "  export PATH=/var/lib/dc/bin:$PATH",
            ],
        ),
    ],
)
def test_status_describes_the_use_of_the_runtime(runtime: str, lines: list[str]) -> None:
    node = NodeStatus("n1", "10.213.77.1", "idle", "none")
    status = Status(replace(TWO, runtime=runtime), (node,), controller_answers=True)
    without = list(describe(replace(status, settings=TWO), LAYOUT))
    assert [line for line in describe(status, LAYOUT) if line not in without] == lines
