"""Build an image: engine, base and digest."""

from __future__ import annotations

import json
import re
import shlex
import stat
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hpcdist
from hpcdist.containers.images import (
    Base,
    Build,
    Engine,
    build_argv,
    default_base,
    default_tag,
    find_checkout,
    find_engine,
    look_up,
    repository,
    revision_of,
    run,
)
from hpcdist.errors import ImageError, UserMistake

# --- `hpcdist image build`: command, checkout, and pinned packages

LOCAL = Base(name="base:1", id="sha256:cd")

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("engine", "build", "command"),
    [
        (
            "docker",
            Build(
                checkout=Path("/src"),
                tag="hpcdist",
                base=Base(name="debian:12", digest="sha256:ab"),
                revision="abc",
                created="2026-11-20T08:00:00+00:00",
            ),
            "docker build --file /src/docker/Dockerfile --tag hpcdist --target default"
            " --build-arg BASE_IMAGE=debian@sha256:ab --build-arg BASE_NAME=debian:12 --build-arg BASE_DIGEST=sha256:ab"
            " --build-arg REVISION=abc --build-arg CREATED=2026-11-20T08:00:00+00:00 /src",
        ),
        (
            "podman",
            Build(checkout=Path("/src"), tag="m:1", target="slim", base=LOCAL, uid=0, gid=7, options=("--squash",)),
            "podman build --format docker --file /src/docker/Dockerfile --tag m:1 --target slim"
            " --build-arg BASE_IMAGE=base:1 --build-arg BASE_NAME=base:1 --build-arg BASE_ID=sha256:cd"
            " --build-arg UID=0 --build-arg GID=7 --squash /src",
        ),
        (
            "buildah",
            Build(checkout=Path("/src"), tag=default_tag("mlflow"), base=Base(name="debian:12"), target="mlflow"),
            "buildah build --format docker --file /src/docker/mlflow.Dockerfile --tag hpcdist-mlflow"
            " --build-arg BASE_IMAGE=debian:12 --build-arg BASE_NAME=debian:12 /src",
        ),
    ],
    ids=["docker", "podman", "buildah"],
)
def test_command_of_a_build(engine: Any, build: Build, command: str) -> None:
    assert shlex.join(build_argv(engine, build)) == command


def test_dockerfile_has_the_version_of_hpcdist_and_the_cuda_version_of_torch() -> None:
    text = (CHECKOUT / "docker" / "Dockerfile").read_text()
    assert re.findall(r"^ARG VERSION=(.*)$", text, re.MULTILINE) == [hpcdist.__version__]
    lock = (CHECKOUT / "docker" / "requirements.txt").read_text()
    (runtime,) = re.findall(r"^nvidia-cuda-runtime==(\d+\.\d+)", lock, re.MULTILINE)
    base = r"^ARG BASE_IMAGE=docker.io/nvidia/cuda:(\d+\.\d+)\.\d+-base-ubuntu24.04(?:@.*)?$"
    assert [runtime] == re.findall(base, text, re.MULTILINE) == re.findall(r"^ARG CUDA=(.+)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["build", "mlflow", "sbom"])
def test_packages_of_build_and_server_are_pinned_with_hashes(name: str) -> None:
    pinned = pinned_packages(f"requirements-{name}.txt")
    declared = (CHECKOUT / "docker" / f"requirements-{name}.in").read_text().splitlines()
    assert {line.partition("[")[0] for line in declared if not line.startswith(("#", "-"))} <= pinned


def test_declared_packages_are_pinned_with_hashes() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    declared = project["dependencies"] + project["optional-dependencies"]["train"]
    assert {re.split(r"[\[<>=]", text)[0] for text in declared} <= pinned_packages("requirements.txt")


def pinned_packages(name: str) -> set[str]:
    entries = re.split(r"^(?=[a-z0-9])", (CHECKOUT / "docker" / name).read_text(), flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in entry for entry in entries)
    return {entry.partition("==")[0] for entry in entries}


@pytest.mark.processes
def test_checkout_is_a_parent_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hpcdist, "__file__", str(tmp_path / "site-packages" / "hpcdist" / "__init__.py"))
    with pytest.raises(UserMistake, match=r"no docker/Dockerfile of hpcdist in .* run this command in a checkout"):
        find_checkout(tmp_path)
    assert revision_of(tmp_path) == ("", ""), "it is no checkout of git"
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    for name in ("docker/Dockerfile", "hpcdist/__init__.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert find_checkout(inner) == tmp_path


@pytest.mark.processes
def test_build_uses_buildkit_and_its_failure_has_the_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    """Docker of Debian 12 refuses the Dockerfiles otherwise: "the --mount option requires BuildKit"."""
    run(Engine("docker"), [sys.executable, "-c", "import os; print(os.environ['DOCKER_BUILDKIT'])"])
    assert capfd.readouterr().out == "1\n"
    with pytest.raises(ImageError, match=r"podman could not build the image \(exit code 3\)"):
        run(Engine("podman"), [sys.executable, "-c", "raise SystemExit(3)"])


# --- The choice of a container engine, with scripts on PATH

ALL = ("docker", "podman", "buildah")

Install = Callable[[str, str], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """Return a function that installs a script on an otherwise empty PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def install(name: str, script: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return install


@pytest.mark.processes
def test_first_working_engine_is_used(install: Install) -> None:
    install("docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    install("podman", '[ "$*" = "--version" ]')  # a command on its store may block for minutes
    install("buildah", "exit 0")
    assert find_engine(None, ALL).name == "podman"
    assert find_engine("buildah", ALL).name == "buildah"
    install("docker", '[ "$*" = "version --format {{.Server.Version}}" ]')
    assert find_engine(None, ALL).name == "docker"


@pytest.mark.processes
def test_error_has_the_problem_of_each_engine(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("docker", "echo first >&2; echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    with pytest.raises(UserMistake) as raised:
        find_engine(None, ALL)
    assert str(raised.value) == (
        "no container engine to use here: docker is installed, but fails: Cannot connect to the Docker daemon;"
        " podman is not installed; buildah is not installed"
    )
    with pytest.raises(UserMistake, match="'buildah' cannot do this; choose one of docker, podman"):
        find_engine("buildah", ALL[:2])
    install("docker", "exec /bin/sleep 60")
    monkeypatch.setattr("hpcdist.containers.images.ANSWER_S", 0.1)
    with pytest.raises(UserMistake, match=r"docker is installed, but fails: no answer within 0\.1 s; podman is not"):
        find_engine(None, ALL)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "is_rootless"), [("[name=seccomp,profile=builtin name=rootless]", True), ("[name=seccomp]", False)]
)
def test_daemon_says_whether_it_is_rootless(install: Install, options: str, is_rootless: bool) -> None:
    install("docker", f"[ \"$*\" = 'info --format {{{{.SecurityOptions}}}}' ] && echo '{options}'")
    install("podman", "echo name=rootless")
    assert Engine("docker").is_rootless_daemon() == is_rootless
    assert not Engine("podman").is_rootless_daemon()


@pytest.mark.processes
def test_failed_command_has_its_last_error_line(install: Install) -> None:
    install("podman", "echo; echo 'Error: no space left' >&2; exit 125")
    with pytest.raises(ImageError, match="`podman image rm` failed: Error: no space left"):
        Engine("podman").output("image", "rm", "x")
    install("podman", "exit 3")
    with pytest.raises(ImageError, match="failed: no error message"):
        Engine("podman").output("ps")


# --- The digest of a base image, with a script that answers like podman and docker

DIGEST, ID = f"sha256:{'ab' * 32}", f"sha256:{'cd' * 32}"

FAKE_ENGINE = """#!/bin/sh
# A fake engine: `image inspect` shows DIR/store/NAME, `pull` copies DIR/registry/NAME there.
echo "$@" >> DIR/calls
name=$(echo "$3" | tr / _)
case "$1" in
  image) cat "DIR/store/$name" 2>/dev/null || { echo "Error: no such image $3" >&2; exit 125; } ;;
  pull) cp "DIR/registry/$name" DIR/store/ 2>/dev/null || { echo "Error: dial tcp: lookup failed" >&2; exit 125; } ;;
esac
"""


class FakeEngine:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("store", "registry"):
            (folder / name).mkdir()

    def put(self, place: str, name: str, *digests: str) -> None:
        text = json.dumps([{"Id": ID.removeprefix("sha256:"), "RepoDigests": list(digests)}])
        (self._folder / place / name.replace("/", "_")).write_text(text)

    def calls(self) -> list[str]:
        file = self._folder / "calls"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    for name in ("podman", "docker", "buildah"):
        script = tmp_path / name
        script.write_text(FAKE_ENGINE.replace("DIR", str(tmp_path)))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return FakeEngine(tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("docker.io/nvidia/cuda:13.2.0-base", f"docker.io/nvidia/cuda@{DIGEST}"),
        ("nvidia/cuda:13.2.0-base", f"docker.io/nvidia/cuda@{DIGEST}"),
        ("docker.io/library/debian:12", f"debian@{DIGEST}"),
        ("debian", f"docker.io/library/debian@{DIGEST}"),
        ("registry:5000/os/debian:12", f"registry:5000/os/debian@{DIGEST}"),
    ],
)
def test_local_image_has_the_digest_of_its_registry(engine: FakeEngine, name: str, listed: str) -> None:
    engine.put("store", name, f"mirror.example/other@sha256:{'00' * 32}", listed)
    found = look_up(Engine("podman"), name, pull=True)
    assert found == Base(name=name, digest=DIGEST)
    assert found.reference == f"{repository(name)}@{DIGEST}"
    assert engine.calls() == [f"image inspect {name}"], "nothing is pulled"


@pytest.mark.processes
@pytest.mark.parametrize("program", ["podman", "docker"])
def test_missing_image_is_pulled_unless_it_is_a_dry_run(engine: FakeEngine, program: Any) -> None:
    name = "docker.io/library/debian:12"
    engine.put("registry", name, f"docker.io/library/debian@{DIGEST}")
    assert look_up(Engine(program), name, pull=False).problem == (
        f"{program} does not have it here, and a dry run pulls nothing"
    )
    assert look_up(Engine(program), name, pull=True).digest == DIGEST


@pytest.mark.processes
@pytest.mark.parametrize("digests", [[], [f"localhost/base@{DIGEST}"]], ids=["docker", "podman"])
def test_image_without_registry_is_recorded_by_its_id(engine: FakeEngine, digests: list[str]) -> None:
    engine.put("store", "localhost/base:1", *digests)
    found = look_up(Engine("podman"), "localhost/base:1", pull=True)
    assert found == Base(name="localhost/base:1", id=ID, problem="a local image without a digest of a registry")
    assert found.reference == "localhost/base:1"


@pytest.mark.processes
def test_failed_pull_keeps_the_tag_and_the_reason(engine: FakeEngine) -> None:
    found = look_up(Engine("podman"), "docker.io/library/debian:12", pull=True)
    assert found.problem == "podman cannot pull it: Error: dial tcp: lookup failed"
    assert (found.reference, found.digest, found.id) == ("docker.io/library/debian:12", "", "")


def test_name_with_digest_and_buildah_need_no_command(engine: FakeEngine) -> None:
    name = f"docker.io/library/debian@{DIGEST}"
    assert look_up(Engine("podman"), name, pull=True) == Base(name=name, digest=DIGEST)
    assert Base(name=name, digest=DIGEST).reference == name
    problem = "buildah reports no digests; docker and podman do"
    assert look_up(Engine("buildah"), "debian", pull=True).problem == problem
    assert engine.calls() == []


def test_default_base_is_read_from_the_dockerfile(tmp_path: Path) -> None:
    for name in ("Dockerfile", "mlflow.Dockerfile"):
        assert default_base(CHECKOUT / "docker" / name).startswith("docker.io/")
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    with pytest.raises(ImageError, match=r"Dockerfile names no base image \(no line `ARG BASE_IMAGE=…`\): restore"):
        default_base(tmp_path / "Dockerfile")
