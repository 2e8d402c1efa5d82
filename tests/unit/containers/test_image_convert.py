"""Tests of `hpcdist image convert`: commands, file names, concurrent and failed conversions."""

from __future__ import annotations

import json
import os
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hpcdist
from hpcdist.containers.images import (
    Engine,
    ImageFacts,
    _sbom,
    _self_test,
    convert,
    inspect,
    look_up,
    parse,
    read_sbom,
    require_driver,
    require_fit,
)
from hpcdist.containers.spec import ContainerSpec
from hpcdist.containers.steps import image_digest
from hpcdist.errors import ImageError, UserMistake

FACTS = ImageFacts(
    name="hpcdist",
    digest="sha256:0123456789abcdef",
    architecture="amd64",
    entrypoint=(),
    user="",
    labels={"org.opencontainers.image.title": "hpcdist", "org.opencontainers.image.version": "1.2.3"},
    env=("PATH=/opt/hpcdist/bin", "HOME=/home/hpcdist"),
)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder on PATH for scripts that record their calls in the file `calls`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def install(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/calls\n{script}\n')
    (folder / name).chmod(0o755)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@pytest.mark.processes
def test_concurrent_conversions_write_the_file_once(programs: Path, tmp_path: Path) -> None:
    install(programs, "enroot", 'echo squashed > "$3"')
    results: list[tuple[Path, bool]] = []
    threads = [
        threading.Thread(target=lambda: results.append(convert(Engine("docker"), FACTS, "sqsh", tmp_path / "images")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    target = tmp_path / "images" / "hpcdist-1.2.3-0123456789ab.sqsh"
    assert {path for path, _ in results} == {target}
    assert sorted(written for _, written in results) == [False, False, False, True]
    assert target.read_text() == "squashed\n"
    (call,) = calls(programs)
    assert re.fullmatch(r"enroot import --output \S+/hpcdist-1.2.3-0123456789ab.sqsh dockerd://hpcdist", call)


@pytest.mark.processes
def test_failed_conversion_leaves_no_file(programs: Path, tmp_path: Path) -> None:
    install(programs, "enroot", 'echo half > "$3"; echo "[ERROR] disk quota exceeded" >&2; exit 1')
    with pytest.raises(ImageError, match=r"`enroot import` failed: \[ERROR\] disk quota exceeded"):
        convert(Engine("docker"), FACTS, "sqsh", tmp_path / "images")
    assert [path.name for path in (tmp_path / "images").iterdir()] == [".hpcdist-1.2.3-0123456789ab.sqsh.lock"]


@pytest.mark.processes
def test_reason_of_tar_is_reported(programs: Path, tmp_path: Path) -> None:
    install(programs, "podman", "case $1 in create) echo 42;; esac")
    summary = "tar: Exiting with failure status due to previous errors"
    install(programs, "tar", f'echo "tar: f: Cannot write: No space left on device" >&2; echo "{summary}" >&2; exit 2')
    with pytest.raises(ImageError, match=r"unpacked: tar: f: Cannot write: No space left on device$"):
        convert(Engine("podman"), FACTS, "dir", tmp_path / "images")
    assert [path.name for path in (tmp_path / "images").iterdir()] == [".hpcdist-1.2.3-0123456789ab.lock"]


@pytest.mark.processes
def test_unfinished_file_is_replaced(programs: Path, tmp_path: Path) -> None:
    install(programs, "enroot", '[ ! -e "$3" ] && echo whole > "$3"')
    (left := tmp_path / ".hpcdist-1.2.3-0123456789ab.sqsh.part").write_text("half")
    target, _ = convert(Engine("docker"), FACTS, "sqsh", tmp_path)
    assert target.read_text() == "whole\n"
    assert not left.exists()


@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")
def test_files_of_other_users_are_neither_returned_nor_written(programs: Path, tmp_path: Path) -> None:
    install(programs, "enroot", 'echo whole > "$3"')
    (folder := tmp_path / "shared").mkdir()
    folder.chmod(0o1777)
    (mine := tmp_path / "mine").write_text("valuable")
    (left := folder / ".hpcdist-1.2.3-0123456789ab.sqsh.part").symlink_to(mine)
    os.chown(left, 65534, 65534, follow_symlinks=False)
    target, is_new = convert(Engine("docker"), FACTS, "sqsh", folder)
    assert (is_new, target.read_text(), mine.read_text()) == (True, "whole\n", "valuable")
    assert convert(Engine("docker"), FACTS, "sqsh", folder) == (target, False)
    spec = ContainerSpec(runtime="apptainer", image=str(target))
    assert image_digest(spec, {}) == "sha256:0123456789ab"
    os.chown(target, 65534, 65534)
    with pytest.raises(UserMistake, match=r"sqsh exists, and nobody .* could have changed it: choose another folder"):
        convert(Engine("docker"), FACTS, "sqsh", folder)
    assert str(image_digest(spec, {})).startswith("ends-sha256:")
    target.unlink()
    target.symlink_to(mine)
    with pytest.raises(UserMistake, match="sqsh exists"):
        convert(Engine("docker"), FACTS, "sqsh", folder)


@pytest.mark.processes
def test_archive_for_apptainer_is_replaced_and_removed(programs: Path, tmp_path: Path) -> None:
    """podman does not overwrite the archive that a killed conversion has left."""
    install(programs, "podman", '[ ! -e "$5" ] && touch "$5"')
    install(programs, "apptainer", 'touch "$2"')
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / ".hpcdist-1.2.3-0123456789ab.sif.part.tar").write_text("half")
    target, _ = convert(Engine("podman"), FACTS, "sif", tmp_path / "images")
    archive = tmp_path / "images" / ".hpcdist-1.2.3-0123456789ab.sif.part.tar"
    saved = (
        rf"podman save --format docker-archive --output {archive.parent}/\.hpcdist\S+/hpcdist-1.2.3-\w+.sif.tar hpcdist"
    )
    assert re.fullmatch(saved, calls(programs)[0])
    built = r"apptainer build (\S+\.sif) docker-archive:\1\.tar"
    assert re.fullmatch(built, calls(programs)[1])
    assert target.exists()
    assert not archive.exists()
    target.unlink()
    convert(Engine("docker"), FACTS, "sif", tmp_path / "images")
    assert calls(programs)[2].endswith(".sif docker-daemon:hpcdist")


def test_missing_conversion_program_is_named(programs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserMistake, match=r"enroot is not installed here; it writes \.sqsh for enroot and pyxis"):
        convert(Engine("docker"), FACTS, "sqsh", tmp_path)


@pytest.mark.processes
def test_messages_of_the_program_are_shown(programs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    install(programs, "enroot", 'echo on stdout; echo "[INFO] Extracting" >&2; touch "$3"')
    convert(Engine("docker"), FACTS, "sqsh", tmp_path)
    printed = capfd.readouterr()
    assert (printed.out, sorted(printed.err.splitlines())) == ("", ["[INFO] Extracting", "on stdout"])


@pytest.mark.processes
def test_podman_removes_the_container_of_enroot(programs: Path, tmp_path: Path) -> None:
    """enroot 4.1 calls `docker rm` for a container of podman, and ends with the exit code of docker."""
    install(programs, "docker", "exit 1")
    install(programs, "podman", "")
    script = '#!/bin/bash\nset -e\ntrap "docker rm -f -v enroot.x" EXIT\necho "enroot $4" >> "${0%/*}/calls"\n'
    script += 'echo image > "$3"\n'
    (programs / "enroot").write_text(script)
    (programs / "enroot").chmod(0o755)
    target, _ = convert(Engine("podman"), FACTS, "sqsh", tmp_path)
    assert target.read_text() == "image\n"
    assert calls(programs) == ["enroot podman://hpcdist", "podman rm -f -v enroot.x"]


@pytest.mark.processes
def test_directory_contains_the_image_variables(programs: Path, tmp_path: Path) -> None:
    install(
        programs,
        "podman",
        'case $1 in create) echo 42;; export) cd "$(mktemp -d)"; mkdir opt dev; touch opt/f dev/null; tar -c .;; esac',
    )
    target, written = convert(Engine("podman"), FACTS, "dir", tmp_path)
    assert written
    assert (target / "opt" / "f").exists()
    assert list((target / "dev").iterdir()) == []
    for place in ("ch", "etc"):
        assert (target / place / "environment").read_text() == "PATH=/opt/hpcdist/bin\nHOME=/home/hpcdist\n"
    assert [call.split()[1] for call in calls(programs)] == ["create", "export", "rm"]


# --- Image facts, and the check that an image fits this machine.


LABELS = {"org.opencontainers.image.title": "hpcdist", "org.opencontainers.image.version": hpcdist.__version__}
RAW: dict[str, Any] = {
    "Id": "ab" * 32,
    "Architecture": "amd64",
    "Config": {"Entrypoint": ["tini", "--", "hpcdist"], "User": "1000:1000", "Labels": LABELS, "Env": ["A=1"]},
}


@pytest.fixture
def facts() -> ImageFacts:
    return parse("hpcdist", RAW)


def test_digest_is_the_same_with_podman_and_docker(facts: ImageFacts) -> None:
    assert facts.digest == "sha256:" + "ab" * 32
    assert parse("hpcdist", RAW | {"Id": f"sha256:{'ab' * 32}"}) == facts
    assert (facts.entrypoint, facts.user, facts.env) == (("tini", "--", "hpcdist"), "1000:1000", ("A=1",))


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


@pytest.mark.parametrize(
    ("changes", "machine", "message"),
    [
        ({}, "aarch64", "is for amd64, this machine is arm64: build or pull it for arm64"),
        (
            {"labels": {}},
            "x86_64",
            "holds no hpcdist (its label 'org.opencontainers.image.title' does not name it): bu",
        ),
        ({"labels": LABELS | {"org.opencontainers.image.title": "ubuntu"}}, "x86_64", "holds no hpcdist (its label"),
        (
            {"labels": LABELS | {"org.opencontainers.image.version": "0.0.9"}},
            "x86_64",
            f"holds hpcdist 0.0.9, and this is {hpcdist.__version__}: build it again",
        ),
    ],
)
def test_image_must_fit_machine_and_version(
    facts: ImageFacts, changes: dict[str, Any], machine: str, message: str
) -> None:
    require_fit(facts, machine="x86_64")
    require_fit(replace(facts, architecture="arm64"), machine="aarch64")
    with pytest.raises(ImageError) as raised:
        require_fit(replace(facts, **changes), machine=machine)
    assert str(raised.value).startswith(f"image hpcdist {message}")


def test_driver_must_support_the_cuda_version(facts: ImageFacts) -> None:
    for cuda, driver in (("13.2", "580.65"), ("13.2", "600.10.1"), ("13.2", "unknown"), ("", "390.1")):
        require_driver(replace(facts, labels={"hpcdist.cuda": cuda}), driver)
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
