"""Tests of the identity of the image that a process runs in."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdist.host.machine import container_runtime, image_facts


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


@pytest.mark.parametrize(
    ("root_mount", "runtime"),
    [
        # A virtual machine whose disk was made of an image of docker.
        ("27 1 254:0 / / rw,relatime - ext4 /dev/vda rw", ""),
        ("27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw", ""),
        ("540 430 0:30 / / rw - overlay overlay rw,lowerdir=/a", "docker"),
        ("540 430 254:0 /var/lib/docker/vfs/dir/0a / rw - ext4 /dev/vda rw", "docker"),
        ("540 430 7:0 / / ro - squashfs /dev/loop0 ro", "docker"),
    ],
)
def test_files_of_a_runtime_do_not_suffice_on_the_disk_of_a_machine(
    tmp_path: Path, root_mount: str, runtime: str
) -> None:
    (tmp_path / ".dockerenv").touch()
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(f"22 27 0:21 / /proc rw - proc proc rw\n{root_mount}\n")
    assert container_runtime(tmp_path) == runtime
