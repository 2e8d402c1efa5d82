"""What an image says of itself, and when it is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hpcdist
from hpcdist.containers.images.engine import Engine
from hpcdist.containers.images.labels import ImageFacts, inspect, parse, read_sbom, require_driver, require_fit
from hpcdist.errors import ImageError

LABELS = {"org.opencontainers.image.title": "hpcdist", "org.opencontainers.image.version": hpcdist.__version__}
RAW: dict[str, Any] = {
    "Id": "ab" * 32,
    "Architecture": "amd64",
    "Size": 7,
    "Config": {"Entrypoint": ["tini", "--", "hpcdist"], "User": "1000:1000", "Labels": LABELS, "Env": ["A=1"]},
}


@pytest.fixture
def facts() -> ImageFacts:
    return parse("hpcdist", RAW)


def test_podman_and_docker_name_the_same_digest(facts: ImageFacts) -> None:
    assert facts.digest == "sha256:" + "ab" * 32
    assert parse("hpcdist", RAW | {"Id": f"sha256:{'ab' * 32}"}) == facts
    assert (facts.entrypoint, facts.user, facts.env, facts.size_bytes) == (
        ("tini", "--", "hpcdist"), "1000:1000", ("A=1",), 7
    )  # fmt: skip


def test_an_image_without_anything_is_read_too() -> None:
    bare = parse("scratch", {"Id": "00", "Config": {"Labels": None, "Entrypoint": None}})
    assert (bare.version, bare.entrypoint, bare.user, bare.architecture) == ("", (), "", "")


def test_the_base_is_shown_with_its_digest_or_its_id(facts: ImageFacts) -> None:
    assert facts.base == ""
    name = {"org.opencontainers.image.base.name": "debian:12", "org.opencontainers.image.base.digest": ""}
    assert replace(facts, labels=name).base == "debian:12"
    assert replace(facts, labels=name | {"hpcdist.base.id": "sha256:cd"}).base == "debian:12 sha256:cd"
    digest = {"org.opencontainers.image.base.digest": "sha256:ab"}
    assert replace(facts, labels=name | digest).base == "debian:12 sha256:ab"


def test_an_image_without_a_bill_of_materials_says_how_to_get_one(facts: ImageFacts) -> None:
    with pytest.raises(ImageError, match=r"image hpcdist has no bill of materials .*: build it again with `hpcdist"):
        read_sbom(Engine("podman"), facts)


def test_one_that_fits_is_taken(facts: ImageFacts) -> None:
    require_fit(facts, machine="x86_64")
    require_fit(replace(facts, architecture="arm64"), machine="aarch64")


def test_another_processor_is_refused(facts: ImageFacts) -> None:
    with pytest.raises(ImageError) as raised:
        require_fit(facts, machine="aarch64")
    assert str(raised.value) == ("image hpcdist is for amd64, this machine is arm64: build or pull it for arm64")


@pytest.mark.parametrize("labels", [{}, LABELS | {"org.opencontainers.image.title": "ubuntu"}])
def test_one_without_hpcdist_is_refused(facts: ImageFacts, labels: dict[str, str]) -> None:
    with pytest.raises(ImageError, match=r"image hpcdist holds no hpcdist .*: build it with `hpcdist image build`"):
        require_fit(replace(facts, labels=labels), machine="x86_64")


def test_another_version_is_refused(facts: ImageFacts) -> None:
    with pytest.raises(ImageError, match=r"holds hpcdist 0\.0\.9, and this is .*: build it again"):
        require_fit(replace(facts, labels=LABELS | {"org.opencontainers.image.version": "0.0.9"}), machine="x86_64")


@pytest.mark.parametrize("version", ["580.65", "580.65.06", "600.10.1"])
def test_a_driver_of_the_same_cuda_line_or_newer_will_do(facts: ImageFacts, version: str) -> None:
    require_driver(replace(facts, labels={"hpcdist.cuda": "13.2"}), version)
    require_driver(replace(facts, labels={"hpcdist.cuda": "13.2"}), "something else")
    require_driver(facts, "390.1")


def test_an_older_driver_is_refused(facts: ImageFacts) -> None:
    with pytest.raises(ImageError) as raised:
        require_driver(replace(facts, labels={"hpcdist.cuda": "13.2"}), "550.54.15")
    assert str(raised.value) == (
        "image hpcdist needs driver 580.65 or newer for its CUDA 13.2, found 550.54.15 here: update the driver, use an"
        " image with an older torch, or launch.device=cpu"
    )


def program(folder: Path, script: str) -> None:
    (folder / "podman").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "podman").chmod(0o755)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("complaint", "message"),
    [
        (
            "Error: inspecting object: x: image not known",
            "podman has no image 'x': `hpcdist image build` makes one here, `podman pull x` fetches one",
        ),
        ("Error: database is locked", "podman cannot inspect image 'x': Error: database is locked"),
    ],
)
def test_a_missing_image_is_told_from_a_failing_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, complaint: str, message: str
) -> None:
    program(tmp_path, f"echo '{complaint}' >&2; exit 125")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageError) as raised:
        inspect(Engine("podman"), "x")
    assert str(raised.value) == message


@pytest.mark.processes
def test_the_engines_description_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, facts: ImageFacts) -> None:
    program(tmp_path, f"[ \"$*\" = 'image inspect hpcdist' ] && echo '{json.dumps([RAW])}'")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert inspect(Engine("podman"), "hpcdist") == facts
