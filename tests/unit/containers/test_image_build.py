"""Tests of `hpcdist image build`: command, checkout, and pinned packages."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

import hpcdist
from hpcdist.containers.images import Base, Build, build_argv, default_tag, find_checkout, revision_of, run
from hpcdist.containers.steps import Engine
from hpcdist.errors import ImageError, UserMistake

LOCAL = Base(name="base:1", id="sha256:cd")
CHECKOUT = Path(__file__).resolve().parents[3]


def test_docker_command() -> None:
    base = Base(name="debian:12", digest="sha256:ab")
    build = Build(checkout=Path("/src"), tag="hpcdist", base=base, revision="abc", created="2026-11-20T08:00:00+00:00")
    assert shlex.join(build_argv("docker", build)) == (
        "docker build --file /src/docker/Dockerfile --tag hpcdist --target default"
        " --build-arg BASE_IMAGE=debian@sha256:ab --build-arg BASE_NAME=debian:12 --build-arg BASE_DIGEST=sha256:ab"
        " --build-arg REVISION=abc --build-arg CREATED=2026-11-20T08:00:00+00:00 /src"
    )


def test_podman_command_with_all_options() -> None:
    build = Build(
        checkout=Path("/src"), tag="mine:1", target="slim", base=LOCAL, uid=0, gid=7, options=("--network=host",)
    )
    assert shlex.join(build_argv("podman", build)) == (
        "podman build --format docker --file /src/docker/Dockerfile --tag mine:1 --target slim"
        " --build-arg BASE_IMAGE=base:1 --build-arg BASE_NAME=base:1 --build-arg BASE_ID=sha256:cd"
        " --build-arg UID=0 --build-arg GID=7 --network=host /src"
    )


def test_mlflow_image_has_a_separate_dockerfile() -> None:
    build = Build(checkout=Path("/src"), tag=default_tag("mlflow"), base=Base(name="debian:12"), target="mlflow")
    assert shlex.join(build_argv("buildah", build)) == (
        "buildah build --format docker --file /src/docker/mlflow.Dockerfile --tag hpcdist-mlflow"
        " --build-arg BASE_IMAGE=debian:12 --build-arg BASE_NAME=debian:12 /src"
    )


def test_version_label_of_the_dockerfile_is_current() -> None:
    """The label is the default of a build argument."""
    text = (CHECKOUT / "docker" / "Dockerfile").read_text()
    assert re.findall(r"^ARG VERSION=(.*)$", text, re.MULTILINE) == [hpcdist.__version__]


def test_pinned_torch_and_base_image_have_the_same_cuda_version() -> None:
    lock = (CHECKOUT / "docker" / "requirements.txt").read_text()
    (runtime,) = re.findall(r"^nvidia-cuda-runtime==(\d+\.\d+)", lock, re.MULTILINE)
    (base,) = re.findall(r"^ARG BASE_IMAGE=docker.io/nvidia/cuda:(\d+\.\d+)\.\d+-base-ubuntu24.04(?:@.*)?$",
                         (CHECKOUT / "docker" / "Dockerfile").read_text(), re.MULTILINE)  # fmt: skip
    (label,) = re.findall(r"^ARG CUDA=(.+)$", (CHECKOUT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    assert runtime == base == label


@pytest.mark.parametrize("name", ["build", "mlflow", "sbom"])
def test_packages_of_build_and_server_are_pinned_with_hashes(name: str) -> None:
    lock = (CHECKOUT / "docker" / f"requirements-{name}.txt").read_text()
    entries = re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in entry for entry in entries)
    declared = (CHECKOUT / "docker" / f"requirements-{name}.in").read_text().splitlines()
    pinned = {entry.partition("==")[0] for entry in entries}
    assert {line.partition("[")[0] for line in declared if not line.startswith(("#", "-"))} <= pinned


def test_declared_packages_are_pinned_with_hashes() -> None:
    lock = (CHECKOUT / "docker" / "requirements.txt").read_text()
    entries = re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in entry for entry in entries)
    pinned = {entry.partition("==")[0] for entry in entries}
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    declared = project["dependencies"] + project["optional-dependencies"]["train"]
    assert {re.split(r"[\[<>=]", text)[0] for text in declared} <= pinned


def test_checkout_is_a_parent_folder(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    for name in ("docker/Dockerfile", "hpcdist/__init__.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert find_checkout(inner) == tmp_path


def test_missing_checkout_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hpcdist, "__file__", str(tmp_path / "site-packages" / "hpcdist" / "__init__.py"))
    with pytest.raises(UserMistake, match=r"no docker/Dockerfile of hpcdist in .* run this command in a checkout"):
        find_checkout(tmp_path)


@pytest.mark.processes
def test_revision_is_empty_outside_of_git(tmp_path: Path) -> None:
    assert revision_of(tmp_path) == ("", "")


@pytest.mark.processes
def test_failed_build_has_its_exit_code() -> None:
    with pytest.raises(ImageError, match=r"podman could not build the image \(exit code 3\)"):
        run(Engine("podman"), [sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.processes
def test_docker_builds_with_buildkit(capfd: pytest.CaptureFixture[str]) -> None:
    """Docker of Debian 12 refuses the Dockerfiles otherwise: "the --mount option requires BuildKit"."""
    run(Engine("docker"), [sys.executable, "-c", "import os; print(os.environ['DOCKER_BUILDKIT'])"])
    assert capfd.readouterr().out == "1\n"
