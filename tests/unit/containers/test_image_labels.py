"""Tests of image facts and of the check that an image fits this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hpcdist
from hpcdist.containers.images import (
    ImageFacts,
    _sbom,
    _self_test,
    inspect,
    look_up,
    parse,
    read_sbom,
    require_driver,
    require_fit,
)
from hpcdist.containers.steps import Engine
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


def test_digest_is_the_same_with_podman_and_docker(facts: ImageFacts) -> None:
    assert facts.digest == "sha256:" + "ab" * 32
    assert parse("hpcdist", RAW | {"Id": f"sha256:{'ab' * 32}"}) == facts
    assert (facts.entrypoint, facts.user, facts.env, facts.size_bytes) == (
        ("tini", "--", "hpcdist"), "1000:1000", ("A=1",), 7
    )  # fmt: skip


def test_image_without_labels_is_parsed() -> None:
    bare = parse("scratch", {"Id": "00", "Config": {"Labels": None, "Entrypoint": None}})
    assert (bare.version, bare.entrypoint, bare.user, bare.architecture) == ("", (), "", "")


def test_base_has_digest_or_id(facts: ImageFacts) -> None:
    assert facts.base == ""
    name = {"org.opencontainers.image.base.name": "debian:12", "org.opencontainers.image.base.digest": ""}
    assert replace(facts, labels=name).base == "debian:12"
    assert replace(facts, labels=name | {"hpcdist.base.id": "sha256:cd"}).base == "debian:12 sha256:cd"
    digest = {"org.opencontainers.image.base.digest": "sha256:ab"}
    assert replace(facts, labels=name | digest).base == "debian:12 sha256:ab"


def test_missing_bill_of_materials_is_an_error(facts: ImageFacts) -> None:
    with pytest.raises(ImageError, match=r"image hpcdist has no bill of materials .*: build it again with `hpcdist"):
        read_sbom(Engine("podman"), facts)


def fits(facts: ImageFacts, machine: str) -> bool:
    try:
        require_fit(facts, machine=machine)
    except ImageError:
        return False
    return True


def test_architecture_must_fit_the_machine(facts: ImageFacts) -> None:
    on_arm = replace(facts, architecture="arm64")
    assert [fits(facts, "x86_64"), fits(on_arm, "aarch64"), fits(on_arm, "x86_64")] == [True, True, False]


def test_other_architecture_is_named_in_the_error(facts: ImageFacts) -> None:
    with pytest.raises(ImageError) as raised:
        require_fit(facts, machine="aarch64")
    assert str(raised.value) == ("image hpcdist is for amd64, this machine is arm64: build or pull it for arm64")


@pytest.mark.parametrize("labels", [{}, LABELS | {"org.opencontainers.image.title": "ubuntu"}])
def test_image_without_hpcdist_is_refused(facts: ImageFacts, labels: dict[str, str]) -> None:
    with pytest.raises(ImageError, match=r"image hpcdist holds no hpcdist .*: build it with `hpcdist image build`"):
        require_fit(replace(facts, labels=labels), machine="x86_64")


def test_image_of_another_version_is_refused(facts: ImageFacts) -> None:
    with pytest.raises(ImageError, match=r"holds hpcdist 0\.0\.9, and this is .*: build it again"):
        require_fit(replace(facts, labels=LABELS | {"org.opencontainers.image.version": "0.0.9"}), machine="x86_64")


@pytest.mark.parametrize(
    ("cuda", "driver", "is_accepted"),
    [
        ("13.2", "580.65", True),
        ("13.2", "600.10.1", True),
        ("13.2", "550.54", False),
        ("13.2", "unknown", True),
        ("", "390.1", True),
    ],
)
def test_driver_must_support_the_cuda_version(facts: ImageFacts, cuda: str, driver: str, is_accepted: bool) -> None:
    try:
        require_driver(replace(facts, labels={"hpcdist.cuda": cuda}), driver)
        accepted = True
    except ImageError:
        accepted = False
    assert accepted == is_accepted


def test_old_driver_is_named_in_the_error(facts: ImageFacts) -> None:
    with pytest.raises(ImageError) as raised:
        require_driver(replace(facts, labels={"hpcdist.cuda": "13.2"}), "550.54.15")
    assert str(raised.value) == (
        "image hpcdist needs driver 580.65 or newer for its CUDA 13.2, found 550.54.15 here: update the driver, use an"
        " image with an older torch, or launch.device=cpu"
    )


def install_podman(folder: Path, script: str) -> None:
    (folder / "podman").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "podman").chmod(0o755)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            "Error: inspecting object: x: image not known",
            "podman has no image 'x': `hpcdist image build` makes one here, `podman pull x` fetches one",
        ),
        ("Error: database is locked", "podman cannot inspect image 'x': Error: database is locked"),
    ],
)
def test_missing_image_and_failing_engine_have_different_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str, message: str
) -> None:
    install_podman(tmp_path, f"echo '{error}' >&2; exit 125")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageError) as raised:
        inspect(Engine("podman"), "x")
    assert str(raised.value) == message


#: Answers of a proxy, of an old or future release, or of a program of the same name.
ODD = ["", "not json", "[]", "[7]", '{"Id": "x"}', '[{"Id": 7}]', "[{}]", "\\377", "[" * 5000]


@pytest.mark.processes
@pytest.mark.parametrize("answer", ODD)
def test_odd_answers_of_the_engine_are_one_clear_error(
    answer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, facts: ImageFacts
) -> None:
    install_podman(tmp_path, f"printf '{answer}'")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageError, match=r"podman gives no valid description of image x: "):
        inspect(Engine("podman"), "x")
    with pytest.raises(ImageError, match=r"podman gives no valid description of image x: "):
        look_up(Engine("podman"), "x", pull=False)
    with pytest.raises(ImageError, match=r"the self-test of image x gives no valid answer: "):
        _self_test(Engine("podman"), "x")
    assert _sbom(Engine("podman"), replace(facts, labels={"hpcdist.sbom": "/sbom.json"})).level == "failure"


@pytest.mark.processes
def test_facts_are_read_from_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, facts: ImageFacts) -> None:
    install_podman(tmp_path, f"[ \"$*\" = 'image inspect hpcdist' ] && echo '{json.dumps([RAW])}'")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert inspect(Engine("podman"), "hpcdist") == facts
