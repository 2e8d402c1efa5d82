"""hpcdist's images: labels, base, build, conversion to the format of a site's runtime, and check."""

import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import hpcdist
from hpcdist.containers.engine import Engine, EngineName, error_line
from hpcdist.errors import ImageError, UserMistake
from hpcdist.host.check_result import Check
from hpcdist.host.gpu_info import driver_problem
from hpcdist.host.json_files import parse_json, parse_object
from hpcdist.host.locks import long_lock
from hpcdist.host.log_files import say
from hpcdist.host.ownership import is_shared, user_of
from hpcdist.host.time_limits import last_line

# An image's labels and other facts, and whether it fits this machine and this version of hpcdist.

TITLE = "org.opencontainers.image.title"
VERSION = "org.opencontainers.image.version"
CUDA = "hpcdist.cuda"
#: Label with the path of the bill of materials in the image.
SBOM = "hpcdist.sbom"
ENTRYPOINT = ("tini", "--", "hpcdist")
#: Processor architectures: the kernel's name, and the name in images.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le"}


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """Facts about an image of the container engine."""

    name: str
    digest: str  #: `sha256:…` of its config: the same in every registry and before a push
    architecture: str
    entrypoint: tuple[str, ...]
    user: str
    labels: Mapping[str, str]
    env: tuple[str, ...]  #: `NAME=value`

    @property
    def version(self) -> str:
        """Version of hpcdist; empty if the labels name none."""
        if self.labels.get(TITLE) != "hpcdist":
            return ""
        return self.labels.get(VERSION, "")


def inspect(engine: Engine, image: str) -> ImageFacts:
    """Return the facts about an image. Raises ImageError if the engine does not have it."""
    done = engine.run("image", "inspect", image)
    if done.returncode:
        error = error_line(done.stderr)
        if any(words in error.lower() for words in ("no such image", "image not known", "no such object")):
            raise ImageError(
                f"{engine.name} has no image {image!r}: `hpcdist image build` makes one here,"
                f" `{engine.name} pull {image}` fetches one"
            )
        raise ImageError(f"{engine.name} cannot inspect image {image!r}: {error}")
    return parse(image, inspected(engine, image, done.stdout))


def inspected(engine: Engine, image: str, answer: str) -> Mapping[str, Any]:
    """Return the description in the answer of `image inspect`. Raises ImageError if it is not valid."""
    try:
        (description,) = parse_json(answer)
        if isinstance(description["Id"], str) and isinstance(description.get("Config") or {}, dict):
            return dict(description)
        raise ValueError("its Id or Config has another type")
    except (ValueError, TypeError, LookupError) as error:
        raise ImageError(f"{engine.name} gives no valid description of image {image}: {error}") from error


def parse(name: str, raw: Mapping[str, Any]) -> ImageFacts:
    """Return the facts in one entry of `docker image inspect` or `podman image inspect`."""
    config = raw.get("Config") or {}
    labels = config.get("Labels") or {}
    env = config.get("Env") or []
    entrypoint = config.get("Entrypoint") or []
    if not (isinstance(labels, dict) and isinstance(env, list) and isinstance(entrypoint, list)):
        raise ImageError(f"the description of image {name} has labels, variables or an entrypoint of another type")
    return ImageFacts(
        name=name,
        digest=_digest_of(raw),
        architecture=str(raw.get("Architecture", "")),
        entrypoint=tuple(map(str, entrypoint)),
        user=str(config.get("User") or ""),
        labels={key: str(value) for key, value in labels.items()},
        env=tuple(map(str, env)),
    )


def require_fit(facts: ImageFacts, *, machine: str = "") -> None:
    """Raise ImageError unless an image is for this processor and has this version of hpcdist.

    Args:
        machine: the processor architecture to require instead of this machine's.
    """
    machine = machine or platform.machine()
    here = ARCHITECTURES.get(machine, machine)
    if facts.architecture != here:
        raise ImageError(
            f"image {facts.name} is for {facts.architecture}, this machine is {here}: build or pull it for {here}"
        )
    if not facts.version:
        raise ImageError(
            f"image {facts.name} holds no hpcdist (its label {TITLE!r} does not name it): build it with"
            " `hpcdist image build`, or FROM an image that was"
        )
    if facts.version != hpcdist.__version__:
        raise ImageError(
            f"image {facts.name} holds hpcdist {facts.version}, and this is {hpcdist.__version__}: build it again with"
            f" `hpcdist image build`, or use hpcdist {facts.version} here"
        )


def require_driver(facts: ImageFacts, driver: str) -> None:
    """Raise ImageError if the GPU driver of this version is too old for the image's CUDA."""
    problem = driver_problem(facts.labels.get(CUDA, ""), driver)
    if problem:
        raise ImageError(
            f"image {facts.name} needs {problem} here: update the driver, use an image with an older torch,"
            " or launch.device=cpu"
        )


# The digest of a build's base image, so that a later build uses the same base.


@dataclass(frozen=True, kw_only=True)
class Base:
    """The base image of a build."""

    name: str  #: as the user or the Dockerfile names it, tag included
    digest: str = ""  #: `sha256:…` of its manifest in a registry
    id: str = ""  #: `sha256:…` of its config, for a local image without a registry digest
    problem: str = ""  #: why there is no digest, in one line

    @property
    def reference(self) -> str:
        """Name of the image for the Dockerfile's FROM, with its digest if that is known."""
        if not self.digest:
            return self.name
        return f"{repository(self.name)}@{self.digest}"


def default_base(dockerfile: Path) -> str:
    """Return the base image that a Dockerfile names. Raises ImageError if it names none."""
    line = re.search(r"^ARG BASE_IMAGE=(\S+)$", dockerfile.read_text(), re.MULTILINE)
    if line is None:
        raise ImageError(f"{dockerfile} names no base image (no line `ARG BASE_IMAGE=…`): restore the file")
    return line[1]


def repository(name: str) -> str:
    """Return the name of an image without tag and digest; a colon before a slash belongs to a port."""
    return re.sub(r":[^/]*$", "", name.partition("@")[0])


def look_up(engine: Engine, name: str, *, pull: bool) -> Base:
    """Find the digest of a base image: in its name, in the store, or by pulling the image as the build would."""
    named_digest = name.partition("@")[2]
    if named_digest:
        return Base(name=name, digest=named_digest)
    done = engine.run("image", "inspect", name)
    if done.returncode and not pull:
        return Base(name=name, problem=f"{engine.name} does not have it here, and a dry run pulls nothing")
    if done.returncode:
        pulled = engine.run("pull", "--quiet", name)
        if pulled.returncode:
            return Base(name=name, problem=f"{engine.name} cannot pull it: {error_line(pulled.stderr)}")
        done = engine.run("image", "inspect", name)
    description = inspected(engine, name, done.stdout)
    digest = _registry_digest(description, name)
    if digest:
        return Base(name=name, digest=digest)
    return Base(name=name, id=_digest_of(description), problem="a local image without a digest of a registry")


def _registry_digest(description: Mapping[str, Any], name: str) -> str:
    """Return the digest of an image in its registry; empty if the description has none."""
    entries = description.get("RepoDigests")
    if not isinstance(entries, list):
        return ""
    # docker leaves it out of names: `debian`, `nvidia/cuda`.
    default_registry = re.compile(r"^(docker\.io/)?(library/)?")
    short_name = default_registry.sub("", repository(name))
    # podman lists a digest of its own for images that were never in a registry, under `localhost`.
    if short_name.startswith("localhost/"):
        return ""
    for entry in entries:
        entry_name, _, digest = str(entry).partition("@")
        if default_registry.sub("", entry_name) == short_name:
            return digest
    return ""


def _digest_of(description: Mapping[str, Any]) -> str:
    """Return the id of an image with `sha256:`, which podman leaves out."""
    return f"sha256:{str(description['Id']).removeprefix('sha256:')}"


# `hpcdist image build`: build hpcdist's images from a checkout.

Target = Literal["default", "slim", "mlflow"]
#: The Dockerfile and the default tag of each target.
TARGETS: dict[Target, tuple[str, str]] = {
    "default": ("docker/Dockerfile", "hpcdist"),
    "slim": ("docker/Dockerfile", "hpcdist:slim"),
    "mlflow": ("docker/mlflow.Dockerfile", "hpcdist-mlflow"),
}


def find_checkout(start: Path) -> Path:
    """Return the checkout to build: the one around `start`, or that of an editable installation.

    Raises UserMistake if there is none.
    """
    for folder in (start, *start.parents, Path(hpcdist.__file__).parents[1]):
        if (folder / "docker" / "Dockerfile").is_file() and (folder / "hpcdist" / "__init__.py").is_file():
            return folder
    raise UserMistake(f"no docker/Dockerfile of hpcdist in {start} or above: run this command in a checkout")


def revision_of(checkout: Path) -> tuple[str, str]:
    """Return the commit, marked `-dirty` if files differ, and its time, for the labels; empty without git."""
    commit = _git_output(checkout, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    time = _git_output(checkout, "log", "-1", "--format=%cI")
    return commit, time


def _git_output(checkout: Path, *arguments: str) -> str:
    """Return the output of a git command; empty if it fails or git is not installed."""
    command = ["git", "-C", str(checkout), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    if done.returncode != 0:
        return ""
    return done.stdout.strip()


def build_argv(
    engine: EngineName,
    checkout: Path,
    base: Base,
    *,
    tag: str | None = None,
    target: Target = "default",
    uid: int | None = None,
    gid: int | None = None,
    options: Sequence[str] = (),
) -> list[str]:
    """Return the command that builds an image.

    Args:
        tag: name of the image, by default that of its target.
        uid: user id of the image's user, by default that of the Dockerfile; `gid` is its group id.
        options: further arguments of the engine.
    """
    dockerfile, default_tag = TARGETS[target]
    revision, created = revision_of(checkout)
    command: list[str] = [engine, "build"]
    if engine != "docker":
        command += ["--format", "docker"]  # the OCI format has no health checks
    command += ["--file", str(checkout / dockerfile), "--tag", tag or default_tag]
    if target != "mlflow":
        command += ["--target", target]
    arguments = {
        "BASE_IMAGE": base.reference,
        "BASE_NAME": base.name,
        "BASE_DIGEST": base.digest or None,
        "BASE_ID": base.id or None,
        "UID": uid,
        "GID": gid,
        "REVISION": revision or None,
        "CREATED": created or None,
    }
    for name, value in arguments.items():
        if value is not None:
            command += ["--build-arg", f"{name}={value}"]
    return [*command, *options, str(checkout)]


def run(engine: Engine, command: Sequence[str]) -> None:
    """Run a build with the engine's output on the terminal."""
    # Debian 12's docker builds without BuildKit unless asked, and the Dockerfiles' mounts need it.
    code = subprocess.run(command, env={**os.environ, "DOCKER_BUILDKIT": "1"}, check=False).returncode
    if code:
        raise ImageError(f"{engine.name} could not build the image (exit code {code}); see its output above")


# `hpcdist image convert`: write an image in the format of a site's runtime, in a file named by the image's digest.

Form = Literal["sqsh", "sif", "dir"]
#: The runtimes that read each format, and the program that writes it.
_READERS = {"sqsh": "enroot and pyxis", "sif": "apptainer", "dir": "apptainer and enroot"}
_TOOLS = {"sqsh": "enroot", "sif": "apptainer", "dir": "tar"}
#: Hexadecimal digits of an image's digest in a file's name, as in short names of images.
_DIGEST_DIGITS = 12
#: `enroot import podman://…` removes its container with `docker`, and fails after writing the file if docker does not
#: answer. enroot is a bash script, in which an exported function replaces a program.
_REMOVE_BY_PODMAN = {"BASH_FUNC_docker%%": '() { podman "$@"; }'}


def convert(engine: Engine, facts: ImageFacts, form: Form, folder: Path) -> tuple[Path, bool]:
    """Write an image in another format unless the file exists; return its path and whether it was written now.

    A lock makes concurrent conversions of one image wait for the first. An unfinished file is in a private folder.
    Raises UserMistake if the program for the format is not installed, or if the file exists and is not trusted.
    """
    # Such as `hpcdist-0.1.0-0123456789ab.sqsh`; a directory has no suffix.
    short_digest = facts.digest.removeprefix("sha256:")[:_DIGEST_DIGITS]
    file_name = f"hpcdist-{facts.version}-{short_digest}"
    if form != "dir":
        file_name += f".{form}"
    target = folder / file_name
    folder.mkdir(parents=True, exist_ok=True)
    with long_lock(target.with_name(f".{target.name}.lock")):
        if os.path.lexists(target):
            _require_trusted(target)
            return target, False
        tool = _TOOLS[form]
        if shutil.which(tool) is None:
            raise UserMistake(
                f"{tool} is not installed here; it writes .{form} for {_READERS[form]}:"
                f" convert on a machine that has it, into a shared folder"
            )
        _remove_parts(folder, target.name)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.part", dir=folder) as private:
            part = Path(private, target.name)
            _write(engine, facts, form, part)
            os.replace(part, target)
    return target, True


def _require_trusted(target: Path) -> None:
    """Raise UserMistake if another user may have written a file: its name then says nothing about its content."""
    about = target.lstat()
    if stat.S_ISLNK(about.st_mode) or about.st_uid not in (os.geteuid(), 0) or is_shared(about):
        raise UserMistake(
            f"{target} exists, and {user_of(about.st_uid)} or others who may write to it could have changed"
            " it: choose another folder with --into, or name the file in container.image if you trust it"
        )


def _remove_parts(folder: Path, name: str) -> None:
    """Remove this user's unfinished files of killed conversions."""
    for part in folder.glob(f".{name}.part*"):
        about = part.lstat()
        if about.st_uid != os.geteuid():
            continue
        if stat.S_ISDIR(about.st_mode):
            shutil.rmtree(part)
        else:
            part.unlink()


def _write(engine: Engine, facts: ImageFacts, form: Form, part: Path) -> None:
    if form == "sqsh":
        _write_sqsh(engine, facts, part)
    elif form == "sif":
        _write_sif(engine, facts, part)
    else:
        _write_folder(engine, facts, part)


def _write_sqsh(engine: Engine, facts: ImageFacts, part: Path) -> None:
    command = ["enroot", "import", "--output", str(part)]
    if engine.name == "podman":
        _run([*command, f"podman://{facts.name}"], _REMOVE_BY_PODMAN)
    else:
        _run([*command, f"dockerd://{facts.name}"], {})


def _write_sif(engine: Engine, facts: ImageFacts, part: Path) -> None:
    source = f"docker-daemon:{facts.name}"
    if engine.name == "podman":
        archive = f"{part}.tar"
        engine.output("save", "--format", "docker-archive", "--output", archive, facts.name)
        source = f"docker-archive:{archive}"
    _run(["apptainer", "build", str(part), source], {})


def _write_folder(engine: Engine, facts: ImageFacts, part: Path) -> None:
    part.mkdir()
    command = ["tar", "--extract", "--no-same-owner", "--exclude=./dev/*", "--exclude=dev/*", f"--directory={part}"]
    # A container that is never started; some images name no command.
    container = engine.output("create", facts.name, "true").strip()
    try:
        with subprocess.Popen([engine.name, "export", container], stdout=subprocess.PIPE) as exported:
            done = subprocess.run(command, stdin=exported.stdout, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode or exported.returncode:
            raise ImageError(f"image {facts.name} could not be unpacked: {error_line(done.stderr)}")
    finally:
        engine.output("rm", container)
    _complete_folder(part, facts)


def _complete_folder(folder: Path, facts: ImageFacts) -> None:
    """Add the folders that mounts need, and the image's variables for enroot and for apptainer."""
    for name in ("etc", "dev", "proc", "sys", "tmp", "mnt", "home"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "etc" / "environment").write_text("".join(f"{variable}\n" for variable in facts.env))
    for_apptainer = folder / ".singularity.d" / "env"
    for_apptainer.mkdir(parents=True)
    exports = []
    for variable in facts.env:
        name, _, value = variable.partition("=")
        exports.append(f"export {name}={shlex.quote(value)}\n")
    (for_apptainer / "90-environment.sh").write_text("".join(exports))


def _run(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Run a command with additional variables, and show its messages: it takes minutes."""
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


# `hpcdist image check`: start an image and verify its contents.

#: Two ranks on CPUs, so that the check means the same on a machine with any number of GPUs.
TRAINING = (
    *("ddp_digits", "stop.max_steps=20", "launch.num_ranks=2", "launch.device=cpu"),
    *("runs_dir=/tmp/check", "name=check"),
)


def check_image(engine: Engine, image: str) -> Iterator[Check]:
    """Yield the result of each check as soon as it is known. Raises ImageError if the image does not fit."""
    facts = inspect(engine, image)
    require_fit(facts)
    yield _result("digest", facts.digest)
    yield _sbom(engine, facts)
    yield _result("entrypoint", " ".join(facts.entrypoint), facts.entrypoint == ENTRYPOINT)
    is_root = facts.user.partition(":")[0] in ("", "0", "root")
    yield _result("user", facts.user or "root", not is_root)
    yield _training(engine, image)


def _training(engine: Engine, image: str) -> Check:
    done = engine.run("run", "--rm", "--ipc=host", image, "run", *TRAINING)
    name = "training on 2 ranks"
    end = last_line(done.stdout)
    if done.returncode == 0 and "finished" in end:
        return _result(name, end)
    return _result(name, last_line(done.stdout + done.stderr), False)


def _result(name: str, text: str, good: bool = True) -> Check:
    return Check(name=name, level="ok" if good else "failure", text=text)


def _sbom(engine: Engine, facts: ImageFacts) -> Check:
    path = facts.labels.get(SBOM, "")
    try:
        text = engine.output("run", "--rm", "--entrypoint", "cat", facts.name, path)
        components = parse_object(text, "components")["components"]
    except (ImageError, ValueError) as error:
        return _result("bill of materials", f"the label {SBOM}={path!r} names none: {error}", False)
    return _result("bill of materials", f"{len(components)} components in {path}")
