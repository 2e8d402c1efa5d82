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
    program = find_engine(engine)
    dockerfile, _ = images.TARGETS[target]
    base_name = base or images.default_base(checkout / dockerfile)
    base_image = images.look_up(program, base_name, pull=not dry_run)
    if base_image.problem:
        note = f"base image {base_name} is not pinned by digest: {base_image.problem}"
        if base_image.id:
            note += f"; its id {base_image.id} is recorded"
        say(note, error=True)
    command = images.build_argv(
        program.name, checkout, base_image, tag=tag, target=target, uid=uid, gid=gid, options=more or ()
    )
    say(shlex.join(command))
    if not dry_run:
        images.run(program, command)


@app.command()
def check(image: Image = "hpcdist", engine: EngineOption = None) -> int:
    """Test an image: version, bill of materials, entrypoint, user, and a training on two ranks.

    Example:  hpcdist image check hpcdist:slim
    """
    from hpcdist.containers.engine import find_engine
    from hpcdist.containers.images import check_image

    has_failed = False
    for result in check_image(find_engine(engine), image):
        if result.level == "ok":
            mark = "[green]ok[/]    "
        else:
            mark = "[red]FAILED[/]"
            has_failed = True
        console().print(f"{mark} [bold]{result.name}[/]: ", end="", highlight=False)
        console().print(result.text, markup=False, highlight=False, soft_wrap=True)
    return 1 if has_failed else 0


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

    program = find_engine(engine)
    facts = inspect(program, image)
    # This checks only the version: the nodes may have another processor than this machine.
    require_fit(facts, machine=facts.architecture)
    path, is_new = write(program, facts, to, into)
    say(str(path) if is_new else f"{path} exists already")
