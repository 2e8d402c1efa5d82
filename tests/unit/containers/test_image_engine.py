"""Tests of the choice of a container engine, with scripts on PATH."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcdist.containers.steps import Engine, find_engine
from hpcdist.errors import ImageError, UserMistake

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

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


def test_first_working_engine_is_used(install: Install) -> None:
    install("docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    install("podman", "exit 0")
    install("buildah", "exit 0")
    assert find_engine(None, ALL).name == "podman"
    assert find_engine("buildah", ALL).name == "buildah"


def test_docker_check_queries_the_daemon(install: Install) -> None:
    install("docker", '[ "$*" = "version --format {{.Server.Version}}" ]')
    assert find_engine(None, ALL).name == "docker"


def test_error_has_the_problem_of_each_engine(install: Install) -> None:
    install("docker", "echo first >&2; echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    with pytest.raises(UserMistake) as raised:
        find_engine(None, ALL)
    assert str(raised.value) == (
        "no container engine to use here: docker is installed, but fails: Cannot connect to the Docker daemon;"
        " podman is not installed; buildah is not installed"
    )


@pytest.mark.parametrize(
    ("options", "is_rootless"), [("[name=seccomp,profile=builtin name=rootless]", True), ("[name=seccomp]", False)]
)
def test_daemon_says_whether_it_is_rootless(install: Install, options: str, is_rootless: bool) -> None:
    install("docker", f"[ \"$*\" = 'info --format {{{{.SecurityOptions}}}}' ] && echo '{options}'")
    install("podman", "echo name=rootless")
    assert Engine("docker").is_rootless_daemon() == is_rootless
    assert not Engine("podman").is_rootless_daemon()


def test_unsuitable_engine_is_refused(install: Install) -> None:
    with pytest.raises(UserMistake, match="'buildah' cannot do this; choose one of docker, podman"):
        find_engine("buildah", ALL[:2])


def test_failed_command_has_its_last_error_line(install: Install) -> None:
    install("podman", "echo; echo 'Error: no space left' >&2; exit 125")
    with pytest.raises(ImageError, match="`podman image rm` failed: Error: no space left"):
        Engine("podman").output("image", "rm", "x")
    install("podman", "exit 3")
    with pytest.raises(ImageError, match="failed: no error message"):
        Engine("podman").output("ps")


def test_podman_check_does_not_open_the_store(install: Install) -> None:
    install("podman", '[ "$*" = "--version" ]')
    assert find_engine(None, ALL).name == "podman"


def test_hanging_engine_is_reported(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("docker", "exec /bin/sleep 60")
    monkeypatch.setattr("hpcdist.containers.steps.ANSWER_S", 0.1)
    with pytest.raises(UserMistake, match="docker does not answer; podman is not installed"):
        find_engine(None, ALL)
