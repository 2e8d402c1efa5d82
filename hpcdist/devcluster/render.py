"""The configuration files of a dev cluster, as pure functions of its settings and layout."""

from __future__ import annotations

import re

from hpcdist.devcluster.settings import ACCOUNTING_PORT, CONTROLLER_PORT, HEAD, NODE_PORT, Layout, Settings

CLUSTER = "hpcdist"
BEGIN = "# >>> hpcdist devcluster: removed by `hpcdist devcluster down`"
END = "# <<< hpcdist devcluster"


def slurm_conf(settings: Settings, layout: Layout) -> str:
    """Return slurm.conf: default behaviour with short timeouts and a fast scheduler."""
    nodes = node_range(settings)
    head = settings.addresses[HEAD]
    gpus = f" Gres=gpu:{settings.gpus_per_node}" if settings.gpus_per_node else ""
    return f"""\
# Written by `hpcdist devcluster up`; changes are lost.
ClusterName={CLUSTER}
SlurmUser=root
SlurmctldHost={HEAD}({head})
SlurmctldPort={CONTROLLER_PORT}
SlurmdPort={NODE_PORT}
CommunicationParameters=NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
StateSaveLocation={layout.controller}
SlurmdSpoolDir={layout.spool}/%n
SlurmctldPidFile={layout.run}/slurm-slurmctld.pid
SlurmdPidFile={layout.run}/slurm-slurmd-%n.pid
SlurmctldLogFile={layout.logs}/slurmctld.log
SlurmdLogFile={layout.logs}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/{settings.proctrack}
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
AccountingStorageHost={head}
AccountingStoragePort={ACCOUNTING_PORT}
AccountingStoragePass={layout.munge_socket}
AccountingStorageEnforce=associations
AccountingStorageTRES=gres/gpu
NodeName={nodes} CPUs={settings.cpus_per_node} RealMemory={settings.memory_mb}{gpus}
PartitionName=main Nodes={nodes} Default=YES PriorityTier=1 GraceTime={settings.grace_time_s} \
DefaultTime=01:00:00 MaxTime=1-00:00:00
PartitionName=high Nodes={nodes} PriorityTier=10 PreemptMode=OFF DefaultTime=01:00:00 MaxTime=1-00:00:00
"""


def gres_conf(settings: Settings, layout: Layout) -> str:
    """Return gres.conf, in which each GPU is a fake device file; empty without GPUs."""
    if not settings.gpus_per_node:
        return ""
    last = settings.gpus_per_node - 1
    numbers = f"[0-{last}]" if last else "0"
    return f"NodeName={node_range(settings)} Name=gpu File={layout.gpus}/gpu{numbers}\n"


def cgroup_conf(settings: Settings, layout: Layout) -> str:
    """Return cgroup.conf, which selects version 1 of cgroups.

    The default, autodetect, stops slurmd without a mounted cgroup file system, and requests a scope from systemd over
    D-Bus for version 2. The plugin of version 1 touches no cgroups until they are used.
    """
    mounted = f"CgroupMountpoint={layout.cgroups}\n" if settings.proctrack == "cgroup" else ""
    return f"CgroupPlugin=cgroup/v1\n{mounted}"


def slurmdbd_conf(settings: Settings, layout: Layout, password: str) -> str:
    """Return slurmdbd.conf with the database's password, which must not be empty."""
    return f"""\
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
DbdHost={HEAD}
DbdAddr={settings.addresses[HEAD]}
DbdPort={ACCOUNTING_PORT}
CommunicationParameters=NoInAddrAny
SlurmUser=root
PidFile={layout.run}/slurm-slurmdbd.pid
LogFile={layout.logs}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm
"""


def database_sql(password: str) -> str:
    """Return the SQL that creates Slurm's database and user if they do not exist."""
    return f"""\
CREATE DATABASE IF NOT EXISTS slurm;
CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED BY '{password}';
GRANT ALL ON slurm.* TO slurm@localhost;
"""


def node_range(settings: Settings) -> str:
    """Return the names of all nodes in Slurm's notation."""
    return f"n[1-{settings.num_nodes}]" if settings.num_nodes > 1 else "n1"


def with_hosts_block(text: str, settings: Settings) -> str:
    """Return /etc/hosts with the cluster's names in a marked block at its end; an existing block is replaced."""
    lines = [BEGIN, *(f"{address} {name}" for name, address in settings.addresses.items()), END]
    return without_hosts_block(text) + "\n" + "\n".join(lines) + "\n"


def without_hosts_block(text: str) -> str:
    """Return /etc/hosts without the block, byte for byte, even if its last line had no line break."""

    def join(match: re.Match[str]) -> str:
        # The line break before the block belongs to it, unless text was appended that needs it.
        between = match.start() > 0 and match.end() < len(text) and text[match.start() - 1] != "\n"
        return "\n" if between else ""

    return re.sub(rf"\n?^{re.escape(BEGIN)}$.*?^{re.escape(END)}$\n?", join, text, flags=re.MULTILINE | re.DOTALL)


def taken_names(text: str, settings: Settings) -> list[str]:
    """Return the cluster's names that /etc/hosts already contains outside the block."""
    words = (line.partition("#")[0].split()[1:] for line in without_hosts_block(text).splitlines())
    taken = {name for names in words for name in names}
    return [name for name in settings.addresses if name in taken]
