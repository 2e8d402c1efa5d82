"""`hpcdist image convert`: write an image in the format of a site's runtime, in a file named by the image's digest."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from hpcdist.containers.images.engine import Engine, EngineName, error_line
from hpcdist.containers.images.labels import ImageFacts
from hpcdist.errors import ImageError, UserMistake
from hpcdist.files.lock import long_lock

Form = Literal["sqsh", "sif", "dir"]
FORMS: tuple[Form, ...] = get_args(Form)
#: The runtimes that read each format, and the program that writes it.
_READERS = {"sqsh": "enroot and pyxis", "sif": "apptainer", "dir": "charliecloud and enroot"}
_TOOLS = {"sqsh": "enroot", "sif": "apptainer", "dir": "tar"}
#: `enroot import podman://…` removes its container with `docker`, and fails after writing the file if docker does not
#: answer. enroot is a bash script, in which an exported function replaces a program.
_REMOVE_BY_PODMAN = {"BASH_FUNC_docker%%": '() { podman "$@"; }'}


def target_of(facts: ImageFacts, form: Form, folder: Path) -> Path:
    """Return the output path, such as `hpcdist-0.1.0-0123456789ab.sqsh`; a directory has no suffix."""
    stem = f"hpcdist-{facts.version}-{facts.digest.removeprefix('sha256:')[:12]}"
    return folder / (stem if form == "dir" else f"{stem}.{form}")


def argv(engine: EngineName, image: str, form: Form, target: Path, archive: Path | None = None) -> list[str]:
    """Return the command that writes an image in another format; `archive` is podman's saved image for apptainer."""
    if form == "sqsh":
        return [
            "enroot",
            "import",
            "--output",
            str(target),
            f"{'dockerd' if engine == 'docker' else 'podman'}://{image}",
        ]
    if form == "sif":
        source = f"docker-archive:{archive}" if archive is not None else f"docker-daemon:{image}"
        return ["apptainer", "build", str(target), source]
    return ["tar", "--extract", "--no-same-owner", "--exclude=./dev/*", "--exclude=dev/*", "--directory", str(target)]


def convert(engine: Engine, facts: ImageFacts, form: Form, folder: Path) -> tuple[Path, bool]:
    """Write an image in another format unless the file exists; return its path and whether it was written now.

    A lock makes concurrent conversions of one image wait for the first. An unfinished file has another name.

    Raises:
        UserMistake: the conversion program is missing, or the disk has too little space.
    """
    target = target_of(facts, form, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with long_lock(target.with_name(f".{target.name}.lock")):
        if target.exists():
            return target, False
        _require_room(facts, form, folder)
        if shutil.which(_TOOLS[form]) is None:
            raise UserMistake(
                f"{_TOOLS[form]} is not installed here; it writes .{form} for {_READERS[form]}:"
                f" convert on a machine that has it, into a shared folder"
            )
        part = target.with_name(f".{target.name}.part")
        _remove(part)
        try:
            _write(engine, facts, form, part)
            os.replace(part, target)
        finally:
            _remove(part)
    return target, True


def _write(engine: Engine, facts: ImageFacts, form: Form, part: Path) -> None:
    if form == "dir":
        part.mkdir()
        _unpack(engine, facts, argv(engine.name, facts.name, form, part))
        _describe(facts, part)
        return
    archive = part.with_name(f"{part.name}.tar") if form == "sif" and engine.name == "podman" else None
    try:
        if archive is not None:
            engine.output("save", "--format", "docker-archive", "--output", str(archive), facts.name)
        functions = _REMOVE_BY_PODMAN if form == "sqsh" and engine.name == "podman" else {}
        _run(argv(engine.name, facts.name, form, part, archive), functions)
    finally:
        if archive is not None:
            archive.unlink(missing_ok=True)


def _unpack(engine: Engine, facts: ImageFacts, command: Sequence[str]) -> None:
    """Unpack the file system of a container that is created but never started."""
    container = engine.output("create", facts.name, "true").strip()  # some images name no command
    try:
        with subprocess.Popen([engine.name, "export", container], stdout=subprocess.PIPE) as source:
            done = subprocess.run(command, stdin=source.stdout, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode or source.returncode:
            raise ImageError(f"image {facts.name} could not be unpacked: {error_line(done)}")
    finally:
        engine.output("rm", container)


def _describe(facts: ImageFacts, root: Path) -> None:
    """Write the image's variables for `ch-run --set-env` and enroot, and create the folders that bind mounts need."""
    for name in ("ch", "etc"):
        (root / name).mkdir(exist_ok=True)
        (root / name / "environment").write_text("".join(f"{line}\n" for line in facts.env))
    for name in ("dev", "proc", "sys", "tmp", "mnt", "home"):
        (root / name).mkdir(exist_ok=True)


def _run(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Run a command with additional variables. Raises ImageError with its last error line."""
    done = subprocess.run(command, env={**os.environ, **env}, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ImageError(f"`{' '.join(command[:2])}` failed: {error_line(done)}")


def _require_room(facts: ImageFacts, form: Form, folder: Path) -> None:
    needed = facts.size_bytes * (2 if form == "sif" else 1)  # apptainer needs an archive as well
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserMistake(
            f"{folder} has {free / 1e9:.1f} GB free, and {facts.name} as .{form} may need {needed / 1e9:.1f} GB:"
            " choose another folder with --into"
        )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError):
            path.unlink()
