"""Configuration files and commands of the dev cluster that depend on its settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.devcluster import host
from hpcdist.devcluster.cluster import NodeStatus, Status, describe
from hpcdist.devcluster.settings import (
    Layout,
    Settings,
    cgroup_conf,
    daemons,
    gres_conf,
    head_batch,
    slurm_conf,
    taken_names,
    with_hosts_block,
    without_hosts_block,
)

LAYOUT = Layout(Path("/var/lib/dc"))
TWO = Settings(num_nodes=2, cpus_per_node=4, gpus_per_node=2, memory_mb=1000, grace_time_s=20)
ONE = Settings(num_nodes=1, gpus_per_node=1)
BARE = Settings(num_nodes=3, gpus_per_node=0)


@pytest.mark.parametrize(
    ("settings", "nodes", "gpus"),
    [
        (TWO, "n[1-2] CPUs=4 RealMemory=1000 Gres=gpu:2", "NodeName=n[1-2] Name=gpu File=/var/lib/dc/gpus/gpu[0-1]\n"),
        (ONE, "n1 CPUs=8 RealMemory=32768 Gres=gpu:1", "NodeName=n1 Name=gpu File=/var/lib/dc/gpus/gpu0\n"),
        (BARE, "n[1-3] CPUs=8 RealMemory=32768", ""),
    ],
)
def test_nodes_and_gpus_of_slurm(settings: Settings, nodes: str, gpus: str) -> None:
    conf = slurm_conf(settings, LAYOUT)
    assert f"NodeName={nodes}\n" in conf
    name, grace_s = nodes.partition(" ")[0], settings.grace_time_s
    assert f"PartitionName=main Nodes={name} Default=YES PriorityTier=1 GraceTime={grace_s} Default" in conf
    assert gres_conf(settings, LAYOUT) == gpus


def test_tracking_of_processes() -> None:
    assert "ProctrackType=proctrack/cgroup\n" in slurm_conf(TWO, LAYOUT)
    assert cgroup_conf(TWO, LAYOUT) == "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/var/lib/dc/cgroup\n"
    without = Settings(num_nodes=2, proctrack="linuxproc")
    assert "ProctrackType=proctrack/linuxproc\n" in slurm_conf(without, LAYOUT)
    assert cgroup_conf(without, LAYOUT) == "CgroupPlugin=cgroup/v1\n"


BLOCK = """\
# >>> hpcdist devcluster: removed by `hpcdist devcluster down`
10.213.77.1 n1
10.213.77.2 n2
10.213.77.254 devcluster-head
10.213.77.253 devcluster-host
# <<< hpcdist devcluster
"""


@pytest.mark.parametrize("text", ["", "127.0.0.1 localhost\n", "127.0.0.1 a\n\n", "\n"])
def test_removed_hosts_block_restores_the_text(text: str) -> None:
    added = with_hosts_block(text, TWO)
    assert added == text + BLOCK
    assert without_hosts_block(added) == without_hosts_block(text) == text
    assert without_hosts_block(added + "10.0.0.1 other\n") == text + "10.0.0.1 other\n"
    assert with_hosts_block("127.0.0.1 no_line_break", TWO) == "127.0.0.1 no_line_break\n" + BLOCK


def test_hosts_block_replaces_an_older_one() -> None:
    once = with_hosts_block("127.0.0.1 localhost\n", Settings(num_nodes=7))
    assert with_hosts_block(once, TWO) == "127.0.0.1 localhost\n" + BLOCK


def test_taken_names_are_those_outside_the_block() -> None:
    text = "10.0.0.7 n2 n9 # n1\n# 10.0.0.8 n1\n10.0.0.9 devcluster-head.\n"
    assert taken_names(with_hosts_block(text, TWO), TWO) == ["n2"]


def test_links_of_the_head() -> None:
    assert head_batch(TWO, LAYOUT).splitlines() == [
        "link set lo up",
        "link add br0 type bridge",
        "addr add 10.213.77.254/24 dev br0",
        "link set br0 up",
        "link set host master br0 up",
        *("link add n1 type veth peer name eth0 netns /var/lib/dc/netns/n1", "link set n1 master br0 up"),
        *("link add n2 type veth peer name eth0 netns /var/lib/dc/netns/n2", "link set n2 master br0 up"),
    ]


def test_daemons_start_after_their_dependencies() -> None:
    found = [(daemon.name, daemon.node) for daemon in daemons(replace(TWO, runtime="docker"), LAYOUT)]
    assert found[:4] == [(name, "devcluster-head") for name in ("munged", "mariadbd", "slurmdbd", "slurmctld")]
    assert found[4:] == [(f"{name}-{node}", node) for name in ("dockerd", "slurmd") for node in ("n1", "n2")]
    assert [daemon.name for daemon in daemons(TWO, LAYOUT)[4:]] == ["slurmd-n1", "slurmd-n2"]


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
    with_docker = Status(replace(TWO, runtime="docker"), (idle,), controller_answers=True)
    assert "  export PATH=/var/lib/dc/bin:$PATH" in describe(with_docker, LAYOUT)
    assert list(describe(Status(TWO), LAYOUT)) == ["slurmctld does not answer: see /var/lib/dc/log/slurmctld.log"]
    assert list(describe(Status(None), LAYOUT)) == [
        "no dev cluster in /var/lib/dc: `hpcdist devcluster up --nodes 4` makes one"
    ]


HEADER = "#!/bin/sh\n# Written by `hpcdist devcluster up`; changes are lost.\n"


def scripts(runtime: str, *names: str, may_raise_limits: bool = True) -> dict[str, str]:
    programs = {name: Path("/opt/bin", name) for name in names}
    settings = replace(TWO, runtime=runtime)
    found = host.scripts(settings, LAYOUT, programs, may_raise_limits=may_raise_limits)
    assert all(text.startswith("#!/bin/sh\n") for text in found.values())
    return {name: text.removeprefix(HEADER) for name, text in found.items()}


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
