"""`hpcdist devcluster`: a Slurm cluster of virtual nodes on this machine."""

import os
import sys
from typing import Annotated, Any, Literal

import typer

from hpcdist.cli.options import flag, option
from hpcdist.devcluster.settings import CLUSTER, MAX_NODES, Layout, Settings
from hpcdist.errors import DevClusterError
from hpcdist.host.log_files import say

app = typer.Typer(
    name="devcluster",
    help="Run a Slurm cluster of virtual nodes on this machine, to test submissions.",
    no_args_is_help=True,
)
node_app = typer.Typer(name="node", help="Inject faults: kill, start or slow down a node.", no_args_is_help=True)
app.add_typer(node_app)

Name = Annotated[str, option("--name", "NAME", "Name of the cluster. Several run side by side.")]
Node = Annotated[str, typer.Argument(metavar="NODE", help="Name of a node, such as n2.")]


def _setting(flag: str, metavar: str, text: str, default: object, **more: Any) -> Any:
    """Return an option without a default value: if it is not given, an existing cluster keeps its setting.

    Args:
        default: the value for a new cluster, which the help shows.
    """
    return option(flag, metavar, text, show_default=str(default), **more)


@app.command()
def up(
    name: Name = CLUSTER,
    num_nodes: Annotated[
        int | None, _setting("--nodes", "N", "Number of nodes.", Settings.num_nodes, min=1, max=MAX_NODES)
    ] = None,
    proctrack: Annotated[
        Literal["cgroup", "linuxproc"] | None,
        _setting(
            "--proctrack",
            "cgroup|linuxproc",
            "How Slurm tracks and signals processes: cgroup as in production, or without cgroups.",
            "cgroup where root may create cgroups of version 1",
        ),
    ] = None,
    runtime: Annotated[
        Literal["none", "apptainer", "pyxis"] | None,
        _setting(
            "--runtime",
            "apptainer|pyxis",
            "Container runtime of the nodes, which must be installed on this machine.",
            Settings.runtime,
        ),
    ] = None,
    pyxis_plugin: Annotated[
        str | None, _setting("--pyxis-plugin", "FILE", "With --runtime pyxis: its plugin.", Settings.pyxis_plugin)
    ] = None,
    users: Annotated[
        list[str] | None,
        option("--user", "USER", "A user who may submit, besides root and SUDO_USER; repeat for more."),
    ] = None,
    install: Annotated[bool, flag("--install", "Install missing Debian packages.")] = False,
) -> None:
    """Start the cluster, or its missing parts. It belongs to the user who created it.

    Examples:
        sudo hpcdist devcluster up --install
        sudo hpcdist devcluster up --nodes 16
        sudo hpcdist devcluster up --name second
        sudo hpcdist devcluster up --runtime apptainer
    """
    from hpcdist.devcluster import cluster, cluster_status

    layout = Layout(name)
    given = {"num_nodes": num_nodes, "proctrack": proctrack, "runtime": runtime, "pyxis_plugin": pyxis_plugin}
    changes = {setting: value for setting, value in given.items() if value is not None}
    cluster.up(layout, changes, users=users or [], install=install, env=os.environ)
    say("\n".join(cluster_status.describe(cluster_status.status(layout), layout)))


@app.command()
def down(
    name: Name = CLUSTER,
    yes: Annotated[bool, flag("--yes", "Do not ask, even if jobs run or the cluster belongs to another user.")] = False,
) -> int:
    """Remove the cluster with all its files, mounts and processes; its jobs are killed.

    Asks first if jobs run or wait, or if the cluster belongs to another user.

    Example:  sudo hpcdist devcluster down
    """
    from hpcdist.devcluster import cluster, cluster_status, host

    layout = Layout(name)
    host.require_root(layout, "down")
    reasons = [] if yes else cluster.reasons_to_ask(layout, cluster.caller(os.environ))
    if reasons:
        text = f"{cluster_status.summary(layout)}: {'; '.join(reasons)}"
        if not (os.isatty(0) and os.isatty(1)):
            raise DevClusterError(f"{text}. `{layout.command('down --yes')}` removes it")
        say(f"{text}. Remove it? [y/N] ", end="")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            say("nothing is removed")
            return 1
    killed = cluster.down(layout)
    say(f"dev cluster {name} is removed: {killed} processes ended")
    return 0


@app.command()
def status(name: Name = CLUSTER) -> int:
    """Show nodes, partitions and how to use them; the exit code is 1 unless the whole cluster is up.

    Example:  hpcdist devcluster status
    """
    from hpcdist.devcluster import cluster_status

    layout = Layout(name)
    state = cluster_status.status(layout)
    say("\n".join(cluster_status.describe(state, layout)))
    return 0 if state.is_up else 1


@node_app.command("kill")
def kill(
    node: Node,
    name: Name = CLUSTER,
    keep_link: Annotated[bool, flag("--keep-link", "Kill the processes only: peers see closed connections.")] = False,
) -> None:
    """Simulate a power failure of a node: cut its link, then kill its processes.

    Example:  sudo hpcdist devcluster node kill n2
    """
    from hpcdist.devcluster import node_faults

    layout = Layout(name)
    killed = node_faults.kill_node(layout, node, keep_link=keep_link)
    say(f"node {node} is down: {killed} processes ended; `{layout.command(f'node start {node}')}` starts it again")


@node_app.command("start")
def start(
    node: Node,
    name: Name = CLUSTER,
    own_mounts: Annotated[bool, flag("--own-mounts", "Give the node a mount namespace of its own.")] = False,
) -> None:
    """Start a killed node again.

    Example:  sudo hpcdist devcluster node start n2
    """
    from hpcdist.devcluster import cluster_processes, node_faults, settings

    layout = Layout(name)
    node_faults.start_node(layout, node, own_mounts=own_mounts)
    pid = cluster_processes.pid_of(layout, settings.slurmd(node))
    message = f"node {node} is up"
    if own_mounts:
        message += f": mount on it with `nsenter --target {pid} --mount mount …`"
    say(message)


@node_app.command("slow")
def slow(
    node: Node,
    name: Name = CLUSTER,
    rate_mbit: Annotated[float | None, option("--rate-mbit", "MBIT", "Mbit/s in each direction.")] = None,
) -> None:
    """Slow down a node's link; without options, restore its full speed.

    Examples:
        sudo hpcdist devcluster node slow n2 --rate-mbit 10
        sudo hpcdist devcluster node slow n2
    """
    from hpcdist.devcluster import node_faults

    node_faults.slow_node(Layout(name), node, rate_mbit=rate_mbit)
    speed = f"{rate_mbit:g} Mbit/s in each direction" if rate_mbit else "full speed"
    say(f"node {node}: {speed}")
