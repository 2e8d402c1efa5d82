"""`hpcdist devcluster`: a Slurm cluster of virtual nodes on this machine."""

import os
from dataclasses import fields
from typing import Annotated, Any, Literal

import typer

from hpcdist.cli.options import flag, option
from hpcdist.devcluster.settings import MAX_NODES, Layout, Settings
from hpcdist.host.log_files import say

app = typer.Typer(
    name="devcluster",
    help="Run a Slurm cluster of virtual nodes on this machine, to test submissions.",
    no_args_is_help=True,
)
node_app = typer.Typer(name="node", help="Inject faults: kill, start or slow down a node.", no_args_is_help=True)
app.add_typer(node_app)

Node = Annotated[str, typer.Argument(metavar="NAME", help="Name of a node, such as n2.")]


def _setting(flag: str, metavar: str, text: str, default: object, **more: Any) -> Any:
    """Return an option that keeps the setting of an existing cluster if it is not given."""
    return option(flag, metavar, text, show_default=str(default), **more)


@app.command()
def up(
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
        option("--user", "NAME", "A user who may submit, besides root and SUDO_USER; repeat for more."),
    ] = None,
    install: Annotated[bool, flag("--install", "Install missing Debian packages.")] = False,
) -> None:
    """Start the cluster, or its missing parts.

    Examples:
        sudo hpcdist devcluster up --install
        sudo hpcdist devcluster up --nodes 16
        sudo hpcdist devcluster up --runtime apptainer
    """
    given = locals()  # by the names of the settings
    from hpcdist.devcluster import cluster

    layout = Layout()
    changes = {one.name: given[one.name] for one in fields(Settings) if given[one.name] is not None}
    caller = os.environ.get("SUDO_USER")
    allowed = [*(users or []), *([caller] if caller else [])]
    cluster.up(layout, changes, users=allowed, install=install, env=os.environ)
    say("\n".join(cluster.describe(cluster.status(layout), layout)))


@app.command()
def down() -> None:
    """Remove the cluster with all its files, mounts and processes; its jobs are killed.

    Example:  sudo hpcdist devcluster down
    """
    from hpcdist.devcluster import cluster

    killed = cluster.down(Layout())
    say(f"the dev cluster is removed: {killed} processes ended")


@app.command()
def status() -> int:
    """Show nodes, partitions and how to use them; the exit code is 1 unless the whole cluster is up.

    Example:  hpcdist devcluster status
    """
    from hpcdist.devcluster import cluster

    layout = Layout()
    found = cluster.status(layout)
    say("\n".join(cluster.describe(found, layout)))
    return 0 if found.is_up else 1


@node_app.command("kill")
def kill(
    name: Node,
    keep_link: Annotated[bool, flag("--keep-link", "Kill the processes only: peers see closed connections.")] = False,
) -> None:
    """Simulate a power failure of a node: cut its link, then kill its processes.

    Example:  sudo hpcdist devcluster node kill n2
    """
    from hpcdist.devcluster import cluster

    killed = cluster.kill_node(Layout(), name, keep_link=keep_link)
    say(f"node {name} is down: {killed} processes ended; `hpcdist devcluster node start {name}` starts it again")


@node_app.command("start")
def start(
    name: Node, own_mounts: Annotated[bool, flag("--own-mounts", "Give the node a mount namespace of its own.")] = False
) -> None:
    """Start a killed node again.

    Example:  sudo hpcdist devcluster node start n2
    """
    from hpcdist.devcluster import cluster, host, settings

    layout = Layout()
    cluster.start_node(layout, name, own_mounts=own_mounts)
    pid = host.pid_of(layout, settings.slurmd(name))
    say(f"node {name} is up" + (f": mount on it with `nsenter --target {pid} --mount mount …`" * own_mounts))


@node_app.command("slow")
def slow(
    name: Node, rate_mbit: Annotated[float | None, option("--rate-mbit", "MBIT", "Mbit/s in each direction.")] = None
) -> None:
    """Slow down a node's link; without options, restore its full speed.

    Examples:
        sudo hpcdist devcluster node slow n2 --rate-mbit 10
        sudo hpcdist devcluster node slow n2
    """
    from hpcdist.devcluster import cluster

    cluster.slow_node(Layout(), name, rate_mbit=rate_mbit)
    say(f"node {name}: {f'{rate_mbit:g} Mbit/s in each direction' if rate_mbit else 'full speed'}")
