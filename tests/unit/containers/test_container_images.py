"""Images: engine, base and digest, build, facts and conversion."""

import json
import os
import re
import shlex
import sys
import threading
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from slurm_recordings import FakeCommands

import hpcdist
from hpcdist.containers import images
from hpcdist.containers.engine import Engine, find_engine
from hpcdist.containers.probe import image_digest
from hpcdist.containers.spec import ContainerSpec
from hpcdist.errors import ImageError, UserMistake

# --- `hpcdist image build`: command, checkout, and pinned packages

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("engine", "base", "settings", "command"),
    [
        (
            "docker",
            images.Base(name="debian:12", digest="sha256:ab"),
            {},
            "docker build --file /src/docker/Dockerfile --tag hpcdist --target default"
            " --build-arg BASE_IMAGE=debian@sha256:ab --build-arg BASE_NAME=debian:12 --build-arg BASE_DIGEST=sha256:ab"
            " --build-arg REVISION=abc --build-arg CREATED=2026-11-20 /src",
        ),
        (
            "podman",
            images.Base(name="base:1", id="sha256:cd"),
            {"target": "mlflow", "uid": 0, "options": ("--squash",)},
            "podman build --format docker --file /src/docker/mlflow.Dockerfile --tag hpcdist-mlflow"
            " --build-arg BASE_IMAGE=base:1 --build-arg BASE_NAME=base:1 --build-arg BASE_ID=sha256:cd"
            " --build-arg UID=0 --build-arg REVISION=abc --build-arg CREATED=2026-11-20 --squash /src",
        ),
    ],
)  # fmt: skip
def test_command_of_a_build(
    monkeypatch: pytest.MonkeyPatch, engine: Any, base: images.Base, settings: dict[str, Any], command: str
) -> None:
    monkeypatch.setattr("hpcdist.containers.images.revision_of", lambda _: ("abc", "2026-11-20"))
    assert shlex.join(images.build_argv(engine, Path("/src"), base, **settings)) == command


def test_dockerfile_has_the_versions_of_hpcdist_and_cuda() -> None:
    text = (CHECKOUT / "docker" / "Dockerfile").read_text()
    assert re.findall(r"^ARG VERSION=(.*)$", text, re.MULTILINE) == [hpcdist.__version__]
    lock = (CHECKOUT / "docker" / "requirements.txt").read_text()
    (runtime,) = re.findall(r"^nvidia-cuda-runtime==(\d+\.\d+)", lock, re.MULTILINE)
    base = r"^ARG BASE_IMAGE=docker.io/nvidia/cuda:(\d+\.\d+)\.\d+-base-ubuntu24.04(?:@.*)?$"
    assert [runtime] == re.findall(base, text, re.MULTILINE) == re.findall(r"^ARG CUDA=(.+)$", text, re.MULTILINE)


def test_declared_packages_are_pinned_with_hashes() -> None:
    for name in ("build", "mlflow", "sbom", "slow"):
        declared = (CHECKOUT / "docker" / f"requirements-{name}.in").read_text().splitlines()
        names = {line.partition("[")[0] for line in declared if not line.startswith(("#", "-"))}
        assert names <= pinned_packages(f"requirements-{name}.txt")
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
        images.find_checkout(tmp_path)
    assert images.revision_of(tmp_path) == ("", ""), "it is no checkout of git"
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    for name in ("docker/Dockerfile", "hpcdist/__init__.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert images.find_checkout(inner) == tmp_path


@pytest.mark.processes
def test_build_uses_buildkit_and_its_failure_has_the_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    """Docker of Debian 12 refuses the Dockerfiles otherwise: "the --mount option requires BuildKit"."""
    images.run(Engine("docker"), [sys.executable, "-c", "import os; print(os.environ['DOCKER_BUILDKIT'])"])
    assert capfd.readouterr().out == "1\n"
    with pytest.raises(ImageError, match=r"podman could not build the image \(exit code 3\)"):
        images.run(Engine("podman"), [sys.executable, "-c", "raise SystemExit(3)"])


# --- The choice of a container engine, with scripts on PATH


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCommands:
    """Scripts that record their calls, the only programs on PATH besides the system's."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return FakeCommands(tmp_path / "bin")


@pytest.mark.processes
def test_first_working_engine_is_used(programs: FakeCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(programs.folder))  # the system may have an engine
    down = "Cannot connect to the Docker daemon"
    programs.add_script("docker", f"echo first >&2; echo '{down}' >&2; exit 1")
    with pytest.raises(UserMistake) as raised:
        find_engine(None)
    assert str(raised.value) == (
        f"no container engine to use here: docker is installed, but fails: {down}; podman is not installed"
    )
    programs.add_script("podman", '[ "$*" = "--version" ]')  # a command on its store may block for minutes
    assert find_engine(None).name == "podman"
    programs.add_script("docker", '[ "$*" = "version --format {{.Server.Version}}" ]')
    assert find_engine(None).name == "docker"
    programs.add_script("docker", "exec /bin/sleep 60")
    monkeypatch.setattr("hpcdist.containers.engine.ANSWER_S", 3.0)  # in which podman answers
    with pytest.raises(
        UserMistake,
        match=r"docker is installed, but fails: no answer within 3 s: choose podman instead, which works here$",
    ):
        find_engine("docker")


@pytest.mark.processes
def test_error_of_an_engine_names_the_other_one_that_works(
    programs: FakeCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(programs.folder))
    programs.add_script("docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    programs.add_script("podman", "exit 0")
    with pytest.raises(UserMistake) as raised:
        find_engine("docker")
    assert str(raised.value) == (
        "docker is installed, but fails: Cannot connect to the Docker daemon: choose podman instead, which works here"
    )
    (programs.folder / "docker").unlink()
    with pytest.raises(UserMistake, match=r"^docker is not installed: choose podman instead, which works here$"):
        find_engine("docker")
    programs.add_script("podman", "exit 1")
    with pytest.raises(UserMistake, match=r"^no container engine to use here: docker is not installed$"):
        find_engine("docker")


@pytest.mark.processes
def test_daemon_says_whether_it_is_rootless(programs: FakeCommands) -> None:
    programs.add_script("podman", "echo name=rootless")
    assert not Engine("podman").is_rootless_daemon()
    for options in ("[name=seccomp,profile=builtin name=rootless]", "[name=seccomp]"):
        programs.add_script("docker", f"[ \"$*\" = 'info --format {{{{.SecurityOptions}}}}' ] && echo '{options}'")
        assert Engine("docker").is_rootless_daemon() == ("rootless" in options)


@pytest.mark.processes
def test_failed_command_has_its_last_error_line(programs: FakeCommands) -> None:
    programs.add_script("podman", "echo; echo 'Error: no space left' >&2; exit 125")
    with pytest.raises(ImageError, match="`podman image rm` failed: Error: no space left"):
        Engine("podman").output("image", "rm", "x")
    programs.add_script("podman", "exit 3")
    with pytest.raises(ImageError, match="failed: no error message"):
        Engine("podman").output("ps")


# --- The digest of a base image, with a script that answers like podman and docker

DIGEST, ID = f"sha256:{'ab' * 32}", f"sha256:{'cd' * 32}"


def image_with(*digests: str) -> str:
    """Return a script of an engine with one image, whose registries have these digests."""
    return f"echo '{json.dumps([{'Id': ID.removeprefix('sha256:'), 'RepoDigests': list(digests)}])}'"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("docker.io/nvidia/cuda:13.2.0-base", f"docker.io/nvidia/cuda@{DIGEST}"),
        ("debian", f"docker.io/library/debian@{DIGEST}"),
        ("registry:5000/os/debian:12", f"registry:5000/os/debian@{DIGEST}"),
    ],
)
def test_local_image_has_the_digest_of_its_registry(programs: FakeCommands, name: str, listed: str) -> None:
    programs.add_script("podman", image_with(f"mirror.example/other@sha256:{'00' * 32}", listed))
    found = images.look_up(Engine("podman"), name, pull=True)
    assert found == images.Base(name=name, digest=DIGEST)
    assert found.reference == f"{images.repository(name)}@{DIGEST}"
    assert programs.calls() == [f"podman image inspect {name}"], "nothing is pulled"


@pytest.mark.processes
def test_image_without_registry_is_recorded_by_its_id(programs: FakeCommands) -> None:
    programs.add_script("podman", image_with(f"localhost/base@{DIGEST}"))
    found = images.look_up(Engine("podman"), "localhost/base:1", pull=True)
    assert found == images.Base(name="localhost/base:1", id=ID, problem="a local image without a digest of a registry")
    assert found.reference == "localhost/base:1"


@pytest.mark.processes
def test_missing_image_is_pulled_unless_it_is_a_dry_run(programs: FakeCommands) -> None:
    name = "docker.io/library/debian:12"
    programs.add_script("podman", "echo 'Error: dial tcp: lookup failed' >&2; exit 125")
    found = images.look_up(Engine("podman"), name, pull=True)
    assert found == images.Base(name=name, problem="podman cannot pull it: Error: dial tcp: lookup failed")
    assert found.reference == name
    stored = image_with(f"docker.io/library/debian@{DIGEST}")
    programs.add_script("podman", f"case $1 in pull) touch pulled;; *) [ -e pulled ] || exit 125; {stored};; esac")
    problem = images.look_up(Engine("podman"), name, pull=False).problem
    assert problem == "podman does not have it here, and a dry run pulls nothing"
    assert images.look_up(Engine("podman"), name, pull=True).digest == DIGEST


def test_name_with_digest_needs_no_command() -> None:
    name = f"docker.io/library/debian@{DIGEST}"
    assert images.look_up(Engine("podman"), name, pull=True) == images.Base(name=name, digest=DIGEST)
    assert images.Base(name=name, digest=DIGEST).reference == name


def test_default_base_is_read_from_the_dockerfile(tmp_path: Path) -> None:
    for name in ("Dockerfile", "mlflow.Dockerfile"):
        assert images.default_base(CHECKOUT / "docker" / name).startswith("docker.io/")
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    with pytest.raises(ImageError, match=r"Dockerfile names no base image \(no line `ARG BASE_IMAGE=…`\): restore"):
        images.default_base(tmp_path / "Dockerfile")


# --- `hpcdist image convert`: commands, file names, concurrent and failed conversions


FACTS = images.ImageFacts(
    name="hpcdist",
    digest="sha256:0123456789abcdef",
    architecture="amd64",
    entrypoint=(),
    user="",
    labels={"org.opencontainers.image.title": "hpcdist", "org.opencontainers.image.version": "1.2.3"},
    env=("PATH=/opt/hpcdist/bin", "HOME=/home/hpcdist"),
)


@pytest.mark.processes
def test_concurrent_conversions_write_the_file_once(programs: FakeCommands, tmp_path: Path) -> None:
    programs.add_script("enroot", 'echo squashed > "$3"')
    results: list[tuple[Path, bool]] = []
    threads = [
        threading.Thread(
            target=lambda: results.append(images.convert(Engine("docker"), FACTS, "sqsh", tmp_path / "images"))
        )
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
    (call,) = programs.calls()
    assert re.fullmatch(r"enroot import --output \S+/hpcdist-1.2.3-0123456789ab.sqsh dockerd://hpcdist", call)


SUMMARY = "tar: Exiting with failure status due to previous errors"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("form", "scripts", "error"),
    [
        ("sqsh", {"enroot": 'echo half > "$3"; echo "[ERROR] disk quota exceeded" >&2; exit 1'},
         r"`enroot import` failed: \[ERROR\] disk quota exceeded"),
        ("dir", {"podman": "case $1 in create) echo 42;; esac",
                 "tar": f"printf '%s\\n' 'tar: f: Cannot write: No space left on device' '{SUMMARY}' >&2; exit 2"},
         "unpacked: tar: f: Cannot write: No space left on device$"),
    ],
)  # fmt: skip
def test_failed_conversion_has_a_reason_and_leaves_no_file(
    programs: FakeCommands, tmp_path: Path, form: Any, scripts: dict[str, str], error: str
) -> None:
    for name, script in scripts.items():
        programs.add_script(name, script)
    with pytest.raises(ImageError, match=error):
        images.convert(Engine("podman"), FACTS, form, tmp_path / "images")
    (lock,) = (tmp_path / "images").iterdir()
    assert lock.suffix == ".lock"


@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")
def test_files_of_other_users_are_neither_returned_nor_written(programs: FakeCommands, tmp_path: Path) -> None:
    programs.add_script("enroot", 'echo whole > "$3"')
    (folder := tmp_path / "shared").mkdir()
    folder.chmod(0o1777)
    (mine := tmp_path / "mine").write_text("valuable")
    (left := folder / ".hpcdist-1.2.3-0123456789ab.sqsh.part").symlink_to(mine)
    os.chown(left, 65534, 65534, follow_symlinks=False)
    target, is_new = images.convert(Engine("docker"), FACTS, "sqsh", folder)
    assert (is_new, target.read_text(), mine.read_text()) == (True, "whole\n", "valuable")
    assert images.convert(Engine("docker"), FACTS, "sqsh", folder) == (target, False)
    spec = ContainerSpec(runtime="apptainer", image=str(target), workdir=tmp_path)
    assert image_digest(spec) == "sha256:0123456789ab"
    os.chown(target, 65534, 65534)
    with pytest.raises(UserMistake, match=r"sqsh exists, and nobody .* could have changed it: choose another folder"):
        images.convert(Engine("docker"), FACTS, "sqsh", folder)
    assert str(image_digest(spec)).startswith("ends-sha256:")
    target.unlink()
    target.symlink_to(mine)
    with pytest.raises(UserMistake, match="sqsh exists"):
        images.convert(Engine("docker"), FACTS, "sqsh", folder)


@pytest.mark.processes
def test_archive_for_apptainer_is_replaced_and_removed(programs: FakeCommands, tmp_path: Path) -> None:
    """podman does not overwrite the archive that a killed conversion has left."""
    programs.add_script("podman", '[ ! -e "$5" ] && touch "$5"')
    programs.add_script("apptainer", 'touch "$2"')
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / ".hpcdist-1.2.3-0123456789ab.sif.part.tar").write_text("half")
    target, _ = images.convert(Engine("podman"), FACTS, "sif", tmp_path / "images")
    archive = tmp_path / "images" / ".hpcdist-1.2.3-0123456789ab.sif.part.tar"
    saved = (
        rf"podman save --format docker-archive --output {archive.parent}/\.hpcdist\S+/hpcdist-1.2.3-\w+.sif.tar hpcdist"
    )
    assert re.fullmatch(saved, programs.calls()[0])
    built = r"apptainer build (\S+\.sif) docker-archive:\1\.tar"
    assert re.fullmatch(built, programs.calls()[1])
    assert target.exists()
    assert not archive.exists()
    target.unlink()
    images.convert(Engine("docker"), FACTS, "sif", tmp_path / "images")
    assert programs.calls()[2].endswith(".sif docker-daemon:hpcdist")


def test_missing_conversion_program_is_named(programs: FakeCommands, tmp_path: Path) -> None:
    with pytest.raises(UserMistake, match=r"enroot is not installed here; it writes \.sqsh for enroot and pyxis"):
        images.convert(Engine("docker"), FACTS, "sqsh", tmp_path)


@pytest.mark.processes
def test_podman_removes_the_container_of_enroot(programs: FakeCommands, tmp_path: Path) -> None:
    """enroot 4.1 calls `docker rm` for a container of podman, and ends with the exit code of docker."""
    programs.add_script("docker", "exit 1")
    programs.add_script("podman", "")
    script = '#!/bin/bash\nset -e\ntrap "docker rm -f -v enroot.x" EXIT\necho "enroot $4" >> "${0%/*}/calls"\n'
    (programs.folder / "enroot").write_text(f'{script}echo image > "$3"\n')
    (programs.folder / "enroot").chmod(0o755)
    target, _ = images.convert(Engine("podman"), FACTS, "sqsh", tmp_path)
    assert target.read_text() == "image\n"
    assert programs.calls() == ["enroot podman://hpcdist", "podman rm -f -v enroot.x"]


@pytest.mark.processes
def test_directory_contains_the_image_variables(programs: FakeCommands, tmp_path: Path) -> None:
    script = 'cd "$(mktemp -d)"; mkdir opt dev; touch opt/f dev/null; tar -c .'
    programs.add_script("podman", f"case $1 in create) echo 42;; export) {script};; esac")
    target, written = images.convert(Engine("podman"), FACTS, "dir", tmp_path)
    assert written
    assert (target / "opt" / "f").exists()
    assert list((target / "dev").iterdir()) == []
    assert (target / "etc/environment").read_text() == "PATH=/opt/hpcdist/bin\nHOME=/home/hpcdist\n"
    for_apptainer = target / ".singularity.d/env/90-environment.sh"
    assert for_apptainer.read_text() == "export PATH=/opt/hpcdist/bin\nexport HOME=/home/hpcdist\n"
    assert [call.split()[1] for call in programs.calls()] == ["create", "export", "rm"]


# --- Image facts, and the check that an image fits this machine.


LABELS = {"org.opencontainers.image.title": "hpcdist", "org.opencontainers.image.version": hpcdist.__version__}
RAW: dict[str, Any] = {
    "Id": "ab" * 32,
    "Architecture": "amd64",
    "Config": {"Entrypoint": ["tini", "--", "hpcdist"], "User": "1000:1000", "Labels": LABELS, "Env": ["A=1"]},
}


@pytest.fixture
def facts() -> images.ImageFacts:
    return images.parse("hpcdist", RAW)


@pytest.mark.parametrize(
    ("changes", "machine", "message"),
    [
        ({}, "aarch64", "is for amd64, this machine is arm64: build or pull it for arm64"),
        ({"labels": {}}, "x86_64",
         "holds no hpcdist (its label 'org.opencontainers.image.title' does not name it): bu"),
        ({"labels": LABELS | {"org.opencontainers.image.version": "0.0.9"}}, "x86_64",
         f"holds hpcdist 0.0.9, and this is {hpcdist.__version__}: build it again"),
    ],
)  # fmt: skip
def test_image_must_fit_machine_and_version(
    facts: images.ImageFacts, changes: dict[str, Any], machine: str, message: str
) -> None:
    images.require_fit(facts, machine="x86_64")
    images.require_fit(replace(facts, architecture="arm64"), machine="aarch64")
    with pytest.raises(ImageError) as raised:
        images.require_fit(replace(facts, **changes), machine=machine)
    assert str(raised.value).startswith(f"image hpcdist {message}")


def test_driver_must_support_the_cuda_version(facts: images.ImageFacts) -> None:
    for cuda, driver in (("13.2", "580.65"), ("13.2", "600.10.1"), ("13.2", "unknown"), ("", "390.1")):
        images.require_driver(replace(facts, labels={"hpcdist.cuda": cuda}), driver)
    with pytest.raises(ImageError) as raised:
        images.require_driver(replace(facts, labels={"hpcdist.cuda": "13.2"}), "550.54.15")
    assert str(raised.value) == (
        "image hpcdist needs driver 580.65 or newer for its CUDA 13.2, found 550.54.15 here: update the driver, use an"
        " image with an older torch, or launch.device=cpu"
    )


@pytest.mark.processes
def test_missing_image_and_failing_engine_have_different_errors(programs: FakeCommands) -> None:
    missing = "podman has no image 'x': `hpcdist image build` makes one here, `podman pull x` fetches one"
    locked = "podman cannot inspect image 'x': Error: database is locked"
    for error, message in (("Error: x: image not known", missing), ("Error: database is locked", locked)):
        programs.add_script("podman", f"echo '{error}' >&2; exit 125")
        with pytest.raises(ImageError) as raised:
            images.inspect(Engine("podman"), "x")
        assert str(raised.value) == message


#: Answers of a proxy, of an old or future release, or of a program of the same name.
ODD = ["", "[7]", '[{"Id": 7}]', "\\377", "[" * 5000]


@pytest.mark.processes
@pytest.mark.parametrize("answer", ODD)
def test_odd_answers_of_the_engine_are_one_clear_error(
    answer: str, programs: FakeCommands, facts: images.ImageFacts
) -> None:
    programs.add_script("podman", f"printf '{answer}'")
    for read in (images.inspect, partial(images.look_up, pull=False)):
        with pytest.raises(ImageError, match=r"podman gives no valid description of image x: "):
            read(Engine("podman"), "x")
    assert images._sbom(Engine("podman"), replace(facts, labels={"hpcdist.sbom": "/sbom.json"})).level == "failure"
