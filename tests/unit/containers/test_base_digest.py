"""Tests of the digest of a base image, with a script that answers like podman and docker."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from hpcdist.containers.images import Base, default_base, look_up, repository
from hpcdist.containers.steps import Engine
from hpcdist.errors import ImageError

DIGEST, ID = f"sha256:{'ab' * 32}", f"sha256:{'cd' * 32}"
CHECKOUT = Path(__file__).resolve().parents[3]
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


def test_name_with_digest_needs_no_engine(engine: FakeEngine) -> None:
    name = f"docker.io/library/debian@{DIGEST}"
    assert look_up(Engine("podman"), name, pull=True) == Base(name=name, digest=DIGEST)
    assert Base(name=name, digest=DIGEST).reference == name
    assert engine.calls() == []


def test_buildah_reports_no_digest(engine: FakeEngine) -> None:
    assert look_up(Engine("buildah"), "debian", pull=True).problem == (
        "buildah reports no digests; docker and podman do"
    )
    assert engine.calls() == []


def test_default_base_is_read_from_the_dockerfile(tmp_path: Path) -> None:
    for name in ("Dockerfile", "mlflow.Dockerfile"):
        assert default_base(CHECKOUT / "docker" / name).startswith("docker.io/")
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    with pytest.raises(ImageError, match=r"Dockerfile names no base image \(no line `ARG BASE_IMAGE=…`\): restore"):
        default_base(tmp_path / "Dockerfile")
