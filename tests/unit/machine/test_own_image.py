"""What a process knows about the image around it."""

from __future__ import annotations

from pathlib import Path

from hpcdist.machine.own_image import image_facts


def test_outside_of_an_image_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert image_facts({}, tmp_path / "absent", tmp_path / "absent") == {}


def test_the_launcher_knows_the_digest_and_the_image_its_build(tmp_path: Path) -> None:
    (tmp_path / "build-id").write_text("abc\n")
    env = {"HPCDIST_IMAGE": "hpcdist", "HPCDIST_IMAGE_DIGEST": "sha256:0"}
    (tmp_path / "base-image").write_text("sha256:1\n")
    assert image_facts(env, tmp_path / "build-id", tmp_path / "base-image") == {
        "image": "hpcdist",
        "image_digest": "sha256:0",
        "image_build": "abc",
        "image_base": "sha256:1",
    }
