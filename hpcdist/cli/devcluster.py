"""`hpcdist devcluster …`: parse, call, print."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdist.devcluster.settings import DEFAULT_STATE, Layout, Settings

if TYPE_CHECKING:
    from hpcdist.devcluster.cluster import Status

app = typer.Typer(
    name="devcluster",
    help="A real Slurm of several virtual nodes on this machine, to try a launch before it costs a queue slot.",
    no_args_is_help=True,
)
node_app = typer.Typer(
    name="node", help="Faults on purpose: kill a node, bring it back, slow it.", no_args_is_help=True
)
app.add_typer(node_app)

State = Annotated[
    Path, typer.Option("--state", envvar="HPCDIST_DEVCLUSTER_STATE", help="Folder that holds all of the cluster.")
]
Node = Annotated[str, typer.Argument(metavar="NAME", help="A node's name, such as n2.")]


@app.command()
def up(
    nodes: Annotated[
        int | None, typer.Option("--nodes", help="Number of nodes, n1 to nN.", show_default=str(Settings.num_nodes))
    ] = None,
    cpus: Annotated[
        int | None, typer.Option("--cpus-per-node", help="What each claims.", show_default=str(Settings.cpus_per_node))
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus-per-node", help="Fake ones.", show_default=str(Settings.gpus_per_node))
    ] = None,
    memory_mb: Annotated[
        int | None, typer.Option("--memory-mb", help="What each claims.", show_default=str(Settings.memory_mb))
    ] = None,
    grace_time_s: Annotated[
        int | None,
        typer.Option("--grace-time-s", help="For a preempted job to save.", show_default=str(Settings.grace_time_s)),
    ] = None,
    subnet: Annotated[
        str | None, typer.Option("--subnet", help="Network of the nodes.", show_default=Settings.subnet)
    ] = None,
    users: Annotated[
        list[str] | None, typer.Option("--user", help="Who may submit besides root and the caller of sudo.")
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Install Debian's packages where they are missing.")
    ] = False,
    state: State = DEFAULT_STATE,
) -> None:
    """Bring the cluster up, or what is missing of it.

    Examples:

        sudo hpcdist devcluster up --install

        sudo hpcdist devcluster up --nodes 16 --grace-time-s 20
    """
    from hpcdist.devcluster import cluster

    layout = Layout(state)
    asked = {
        "num_nodes": nodes,
        "cpus_per_node": cpus,
        "gpus_per_node": gpus,
        "memory_mb": memory_mb,
        "grace_time_s": grace_time_s,
        "subnet": subnet,
    }
    changes = {name: value for name, value in asked.items() if value is not None}
    caller = os.environ.get("SUDO_USER")
    allowed = [*(users or []), *([caller] if caller else [])]
    cluster.up(layout, changes, users=allowed, install=install, env=os.environ)
    _show(cluster.status(layout), layout)


@app.command()
def down(state: State = DEFAULT_STATE) -> None:
    """Take the cluster away with everything it has made, after a crash too. Jobs on it are killed.

    Example:  sudo hpcdist devcluster down
    """
    from hpcdist.devcluster import cluster

    killed = cluster.down(Layout(state))
    print(f"the dev cluster is down: {killed} processes ended, nothing is left of it")


@app.command()
def status(state: State = DEFAULT_STATE) -> int:
    """Show nodes, partitions and how to use them. Ends with 1 when the cluster is not wholly up.

    Example:  hpcdist devcluster status
    """
    from hpcdist.devcluster import cluster

    layout = Layout(state)
    found = cluster.status(layout)
    _show(found, layout)
    return 0 if found.is_up else 1


@node_app.command("kill")
def kill(
    name: Node,
    keep_link: Annotated[
        bool, typer.Option("--keep-link", help="Kill the processes alone; peers see their connections closed.")
    ] = False,
    state: State = DEFAULT_STATE,
) -> None:
    """End a node as a power cut does: its link, then all its processes.

    Example:  sudo hpcdist devcluster node kill n2
    """
    from hpcdist.devcluster import nodes

    killed = nodes.kill_node(Layout(state), name, keep_link=keep_link)
    print(f"{name} is dead: {killed} processes ended; `hpcdist devcluster node start {name}` brings it back")


@node_app.command("start")
def start(
    name: Node,
    own_mounts: Annotated[
        bool, typer.Option("--own-mounts", help="What is mounted among its processes is seen there alone.")
    ] = False,
    state: State = DEFAULT_STATE,
) -> None:
    """Bring a dead node back.

    Example:  sudo hpcdist devcluster node start n2
    """
    from hpcdist.devcluster import argv, nodes, processes

    layout = Layout(state)
    nodes.start_node(layout, name, own_mounts=own_mounts)
    pid = processes.pid_of(layout, argv.slurmd(name))
    print(f"{name} is back" + (f": mount things on it by `nsenter --target {pid} --mount mount …`" * own_mounts))


@node_app.command("slow")
def slow(
    name: Node,
    rate_mbit: Annotated[float | None, typer.Option("--rate-mbit", help="Mbit/s in each direction.")] = None,
    delay_ms: Annotated[
        float | None, typer.Option("--delay-ms", help="Added in each direction; needs the kernel's netem.")
    ] = None,
    state: State = DEFAULT_STATE,
) -> None:
    """Slow a node's link; without options it gets its full speed back.

    Examples:

        sudo hpcdist devcluster node slow n2 --rate-mbit 10

        sudo hpcdist devcluster node slow n2
    """
    from hpcdist.devcluster import nodes

    nodes.slow_node(Layout(state), name, rate_mbit=rate_mbit, delay_ms=delay_ms)
    slowed = " and ".join(
        text for text in (rate_mbit and f"{rate_mbit:g} Mbit/s", delay_ms and f"{delay_ms:g} ms more") if text
    )
    print(f"{name}: {slowed} in each direction" if slowed else f"{name}: full speed")


def _show(status: Status, layout: Layout) -> None:
    from hpcdist.devcluster.view import describe

    print("\n".join(describe(status, layout)))
