"""Tests of the identity of the image that a process runs in."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdist.machine.own_image import container_runtime, image_facts


def test_process_outside_of_an_image_has_no_facts(tmp_path: Path) -> None:
    assert image_facts({}, tmp_path / "absent", tmp_path / "absent", tmp_path) == {}


def test_facts_come_from_the_environment_and_files_of_the_image(tmp_path: Path) -> None:
    (tmp_path / "build-id").write_text("abc\n")
    env = {"HPCDIST_IMAGE": "hpcdist", "HPCDIST_IMAGE_DIGEST": "sha256:0"}
    (tmp_path / "base-image").write_text("sha256:1\n")
    (tmp_path / ".dockerenv").touch()
    assert image_facts(env, tmp_path / "build-id", tmp_path / "base-image", tmp_path) == {
        "image": "hpcdist",
        "image_digest": "sha256:0",
        "image_build": "abc",
        "image_base": "sha256:1",
        "container_runtime": "docker",
    }


@pytest.mark.parametrize(
    ("mark", "runtime"),
    [(".dockerenv", "docker"), ("run/.containerenv", "podman"), ("ch/environment", "charliecloud"), ("etc/hosts", "")],
)
def test_runtime_is_known_by_its_files(tmp_path: Path, mark: str, runtime: str) -> None:
    (tmp_path / mark).parent.mkdir(exist_ok=True)
    (tmp_path / mark).touch()
    assert container_runtime(tmp_path) == runtime
