"""Tests of `hpcdist image convert` with the real enroot and apptainer, which start what was written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import runtime_cases
import small_image
from containers import RUNTIMES, Containers

import hpcdist

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TAG = f"{small_image.NAME}-converted"
#: Start a command in each format, with the checkout and its packages mounted, as in the matrix of runtimes.
STARTS: dict[str, Sequence[str]] = {
    "sif": ("apptainer", "exec", "--no-home", *small_image.mount_flags("apptainer"), "IMAGE"),
    "sqsh": ("enroot", "start", *small_image.mount_flags("enroot"), "IMAGE"),
    "dir": ("ch-run", "--set-env", *small_image.mount_flags("charliecloud"), "IMAGE", "--"),
}
CASES = {"sif": "apptainer-sif", "sqsh": "enroot-sqsh", "dir": "charliecloud"}


@pytest.fixture(scope="module")
def labelled(containers: Containers) -> Iterator[str]:
    """An image that names hpcdist's version and sets a variable, as `hpcdist image build` makes it."""
    image = small_image.build(containers)
    text = f"""
        FROM {image.name}
        LABEL org.opencontainers.image.title=hpcdist
        LABEL org.opencontainers.image.version={hpcdist.__version__}
        ENV OF_IMAGE=here
        CMD ["true"]
    """  # enroot does not import an image without a command
    command = ["podman", "build", "--isolation=chroot", f"--tag={TAG}", "-"]
    subprocess.run(command, env=containers.env, input=text, capture_output=True, text=True, check=True)
    yield TAG
    containers.podman("image", "rm", TAG)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All runtimes on PATH; returns the folder of their temporary files."""
    bins = ":".join(str(RUNTIMES / name / "bin") for name in ("apptainer", "enroot"))
    folder = tmp_path / "temporary"
    folder.mkdir()
    for name, value in {
        "PATH": f"{bins}:{os.environ['PATH']}",
        "TMPDIR": str(folder),
        **runtime_cases.apptainer_env(),
        **{f"ENROOT_{part}_PATH": str(tmp_path / "enroot") for part in ("DATA", "RUNTIME", "CACHE")},
        "ENROOT_LOGIN_SHELL": "no",
        "USER": "root",  # ch-run does not start without it
    }.items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.mark.parametrize("form", CASES)
def test_converted_image_starts(form: str, containers: Containers, labelled: str, tools: Path, tmp_path: Path) -> None:
    if (reason := small_image.mismatch() or runtime_cases.missing_program(CASES[form])) is not None:
        pytest.skip(reason)
    command = ("image", "convert", labelled, "--engine", "podman", "--to", form, "--into", "images")
    done = containers.hpcdist(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stem = f"hpcdist-{hpcdist.__version__}-{containers.inspect(labelled)['Id'][:12]}"
    name = stem if form == "dir" else f"{stem}.{form}"
    assert done.stdout == f"images/{name}\n"
    again = containers.hpcdist(*command, cwd=tmp_path)
    assert again.stdout == f"images/{name} exists already\n", again.stderr

    start = [str(tmp_path / "images" / name) if word == "IMAGE" else word for word in STARTS[form]]
    code = "import os, hpcdist, torch; print(hpcdist.__version__, os.environ['OF_IMAGE'])"
    ran = subprocess.run([*start, "python3", "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == f"{hpcdist.__version__} here\n", ran.stderr

    assert {path.name for path in (tmp_path / "images").iterdir()} == {name, f".{name}.lock"}
    assert list(tools.iterdir()) == []
    assert containers.podman("ps", "--all", "--quiet", f"--filter=ancestor={labelled}") == ""
