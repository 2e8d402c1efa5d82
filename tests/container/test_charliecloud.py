"""Test of an image that `hpcdist image convert` writes for charliecloud."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from containers import BASE, Containers, last_lines

import hpcdist

TINY = "localhost/hpcdist-tiny:test"


@pytest.fixture
def tiny(containers: Containers, tmp_path: Path) -> str:
    """Return a small image with the labels of hpcdist."""
    (tmp_path / "Dockerfile").write_text(
        f"FROM {BASE}\n"
        "LABEL org.opencontainers.image.title=hpcdist\n"
        f"LABEL org.opencontainers.image.version={hpcdist.__version__}\n"
        "ENV GREETING=hello\n"
        "RUN mkdir /runs && echo inside > /marker\n"
    )
    options = ("--format", "docker", "--isolation", "chroot", "--network", "host")
    containers.podman("build", *options, "--tag", TINY, str(tmp_path))
    return TINY


def test_converted_directory_runs_in_charliecloud(containers: Containers, tiny: str, tmp_path: Path) -> None:
    if shutil.which("ch-run") is None:
        assert os.environ.get("HPCDIST_REQUIRE_CONTAINERS") != "1", "charliecloud is not installed"
        pytest.skip("charliecloud is not installed: run scripts/test_packages.sh")
    command = ("image", "convert", tiny, "--to", "dir", "--into", str(tmp_path / "images"), "--engine", "podman")
    done = containers.hpcdist(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = Path(done.stdout.strip())
    digest = containers.inspect(tiny)["Id"]
    assert folder.name == f"hpcdist-{hpcdist.__version__}-{digest[:12]}"
    assert last_lines(containers.hpcdist(*command, cwd=tmp_path)) == [f"{folder} exists already"]

    (tmp_path / "runs").mkdir()
    ch_run = ["ch-run", "--set-env", f"--bind={tmp_path}/runs:/runs", str(folder), "--"]
    script = "cat /marker; echo $GREETING > /runs/greeting"
    env = {**os.environ, "USER": "ada"}
    done = subprocess.run([*ch_run, "sh", "-c", script], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "inside\n"), done.stderr
    assert (tmp_path / "runs" / "greeting").read_text() == "hello\n"
