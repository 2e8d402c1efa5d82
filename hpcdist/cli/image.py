"""`hpcdist image`: build, check and convert container images."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from hpcdist.cli.options import DryRun, console, option
from hpcdist.host.log_files import say

app = typer.Typer(name="image", help="Build, check and convert container images.", no_args_is_help=True)

EngineOption = Annotated[
    Literal["docker", "podman"] | None,
    option("--engine", "ENGINE", "docker or podman; the first that works by default."),
]
Image = Annotated[str, typer.Argument(metavar="IMAGE", help="A local image.")]


@app.command()
def build(
    tag: Annotated[str | None, option("--tag", "NAME", "Name of the image; `hpcdist` by default.")] = None,
    target: Annotated[
        Literal["default", "slim", "mlflow"],
        option("--target", "TARGET", "default, slim (without compiler and torch.compile), or mlflow (the server)."),
    ] = "default",
    base: Annotated[str | None, option("--base", "IMAGE", "Base image instead of the Dockerfile's.")] = None,
    uid: Annotated[int | None, option("--uid", "UID", "User id of the image's user.")] = None,
    gid: Annotated[int | None, option("--gid", "GID", "Group id of the image's user.")] = None,
    more: Annotated[
        list[str] | None, option("--option", "WORD", "Additional argument of the engine; repeat for more.")
    ] = None,
    engine: EngineOption = None,
    dry_run: DryRun = False,
) -> None:
    """Build an image from a checkout; the base image is pinned by its digest if that can be looked up.

    Examples:
        hpcdist image build
        hpcdist image build --target slim --base docker.io/library/ubuntu:24.04
        hpcdist image build --option --secret --option id=pip.conf,src=$HOME/.config/pip/pip.conf
    """
    from hpcdist.containers import images
    from hpcdist.containers.engine import find_engine

    checkout = images.find_checkout(Path.cwd())
    found = find_engine(engine)
    named = base or images.default_base(checkout / images.TARGETS[target][0])
    looked_up = images.look_up(found, named, pull=not dry_run)
    if looked_up.problem:
        kept = f"; its id {looked_up.id} is recorded" if looked_up.id else ""
        say(f"base image {named} is not pinned by digest: {looked_up.problem}{kept}", error=True)
    command = images.build_argv(
        found.name, checkout, looked_up, tag=tag, target=target, uid=uid, gid=gid, options=more or ()
    )
    say(shlex.join(command))
    if not dry_run:
        images.run(found, command)


@app.command()
def check(image: Image = "hpcdist", engine: EngineOption = None) -> int:
    """Test an image: version, bill of materials, entrypoint, user, and a training on two ranks.

    Example:  hpcdist image check hpcdist:slim
    """
    from hpcdist.containers.engine import find_engine
    from hpcdist.containers.images import check_image

    failed = 0
    for found in check_image(find_engine(engine), image):
        failed += found.level == "failure"
        mark = "[green]ok[/]    " if found.level == "ok" else "[red]FAILED[/]"
        console().print(f"{mark} [bold]{found.name}[/]: ", end="", highlight=False)
        console().print(found.text, markup=False, highlight=False, soft_wrap=True)
    return 1 if failed else 0


@app.command()
def convert(
    to: Annotated[
        Literal["sqsh", "sif", "dir"],
        option("--to", "FORMAT", "sqsh (enroot, pyxis), sif (apptainer) or dir (apptainer, enroot)."),
    ],
    image: Image = "hpcdist",
    into: Annotated[Path, option("--into", "DIR", "Folder on a file system that all nodes share.")] = Path("images"),
    engine: EngineOption = None,
) -> None:
    """Convert an image to the format of a site's container runtime; the file is named by the image's digest.

    Example:  hpcdist image convert --to sqsh --into /shared/images
    """
    from hpcdist.containers.engine import find_engine
    from hpcdist.containers.images import convert as write
    from hpcdist.containers.images import inspect, require_fit

    found = find_engine(engine)
    facts = inspect(found, image)
    require_fit(facts, machine=facts.architecture)
    target, written = write(found, facts, to, into)
    say(f"{target}{'' if written else ' exists already'}")
