"""`hpcdist image convert`: write an image in the format of a site's runtime, in a file named by the image's digest."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from hpcdist.containers.images.engine import Engine, EngineName, error_line
from hpcdist.containers.images.labels import ImageFacts
from hpcdist.errors import ImageError, UserMistake
from hpcdist.files.lock import long_lock
from hpcdist.files.ownership import is_shared, user_of
from hpcdist.logs import say

Form = Literal["sqsh", "sif", "dir"]
FORMS: tuple[Form, ...] = get_args(Form)
#: The runtimes that read each format, and the program that writes it.
_READERS = {"sqsh": "enroot and pyxis", "sif": "apptainer", "dir": "charliecloud and enroot"}
_TOOLS = {"sqsh": "enroot", "sif": "apptainer", "dir": "tar"}
#: Variables that name the folder in which a tool unpacks the image, instead of TMPDIR.
_TEMPORARY = {"sqsh": "ENROOT_TEMP_PATH", "sif": "APPTAINER_TMPDIR"}
#: Space that a conversion needs in the folder of the file and in the temporary folder, in sizes of the unpacked image.
#: An engine's archive and enroot's file, whose data is not compressed by default, count as 1, apptainer's file as 0.5;
#: apptainer writes it in the temporary folder and copies it.
_NUM_IMAGES = {
    ("sqsh", "podman"): (1.0, 1.0),
    ("sqsh", "docker"): (1.0, 1.0),
    ("sif", "podman"): (1.5, 1.5),
    ("sif", "docker"): (0.5, 2.5),
}
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

    A lock makes concurrent conversions of one image wait for the first. An unfinished file is in a private folder.

    Raises:
        UserMistake: the conversion program is missing, the disk has too little space, or the file is another user's.
    """
    target = target_of(facts, form, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with long_lock(target.with_name(f".{target.name}.lock")):
        if os.path.lexists(target):
            _require_own(target)
            return target, False
        _require_room(engine, facts, form, folder)
        if shutil.which(_TOOLS[form]) is None:
            raise UserMistake(
                f"{_TOOLS[form]} is not installed here; it writes .{form} for {_READERS[form]}:"
                f" convert on a machine that has it, into a shared folder"
            )
        for left in folder.glob(f".{target.name}.part*"):  # of killed conversions
            _remove(left)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.part", dir=folder) as private:
            part = Path(private, target.name)
            _write(engine, facts, form, part)
            os.replace(part, target)
    return target, True


def _require_own(target: Path) -> None:
    """Raise UserMistake if another user could have written an image: its name says nothing about its content."""
    about = target.lstat()
    if stat.S_ISLNK(about.st_mode) or about.st_uid not in (os.geteuid(), 0) or is_shared(about):
        raise UserMistake(
            f"{target} exists, and {user_of(about.st_uid)} or others who may write to it could have changed it: choose"
            " another folder with --into, or name the file in container.image if you trust it"
        )


def _write(engine: Engine, facts: ImageFacts, form: Form, part: Path) -> None:
    if form == "dir":
        part.mkdir()
        _unpack(engine, facts, argv(engine.name, facts.name, form, part))
        _describe(facts, part)
        return
    archive = part.with_name(f"{part.name}.tar") if form == "sif" and engine.name == "podman" else None
    if archive is not None:
        engine.output("save", "--format", "docker-archive", "--output", str(archive), facts.name)
    functions = _REMOVE_BY_PODMAN if form == "sqsh" and engine.name == "podman" else {}
    _run(argv(engine.name, facts.name, form, part, archive), functions)


def _unpack(engine: Engine, facts: ImageFacts, command: Sequence[str]) -> None:
    """Unpack the file system of a container that is created but never started."""
    container = engine.output("create", facts.name, "true").strip()  # some images name no command
    try:
        with subprocess.Popen([engine.name, "export", container], stdout=subprocess.PIPE) as source:
            done = subprocess.run(command, stdin=source.stdout, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode or source.returncode:
            raise ImageError(f"image {facts.name} could not be unpacked: {error_line(done.stderr)}")
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
    """Run a command with additional variables, and show its messages: it takes minutes.

    Raises ImageError with its last error line.
    """
    lines = []
    with subprocess.Popen(
        command, env={**os.environ, **env}, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            say(line, end="", error=True)
            lines.append(line)
    if running.returncode:
        raise ImageError(f"`{' '.join(command[:2])}` failed: {error_line(''.join(lines))}")


def _require_room(engine: Engine, facts: ImageFacts, form: Form, folder: Path) -> None:
    """Raise UserMistake if a file system has too little space for the files that a conversion writes."""
    if form == "dir":
        images = {folder: 1.0}
    else:
        temporary = Path(os.environ.get(_TEMPORARY[form]) or os.environ.get("TMPDIR") or tempfile.gettempdir())
        in_folder, in_temporary = _NUM_IMAGES[form, engine.name]
        images = {folder: in_folder, temporary: in_temporary}
    for place in images:
        num = sum(count for other, count in images.items() if _device(other) == _device(place))
        needed, free = num * facts.size_bytes, shutil.disk_usage(place).free
        if free < needed:
            option = "--into" if place == folder else f"the variable {_TEMPORARY[form]}"
            raise UserMistake(
                f"{place} has {free / 1e9:.1f} GB free, and the conversion of {facts.name} to .{form} may need"
                f" {needed / 1e9:.1f} GB there: choose another folder with {option}"
            )


def _device(path: Path) -> int:
    """Return the number of the file system of a folder."""
    return path.stat().st_dev


def _remove(path: Path) -> None:
    """Remove a file or folder of this user."""
    about = path.lstat()
    if about.st_uid == os.geteuid():
        shutil.rmtree(path) if stat.S_ISDIR(about.st_mode) else path.unlink()
