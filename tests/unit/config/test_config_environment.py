"""The section `cluster.environment`."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import Write, problems

from hpcdist.config.loading import load_config


def test_site_profile_may_contain_the_environment(write: Write, tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("partition: gpu\nenvironment: {kind: uv, local_dir: $SLURM_TMPDIR}\n")
    config = load_config(write("cluster: {environment: {path: project}}\n"), cluster=site)
    environment = config.cluster.environment
    assert (environment.kind, environment.path) == ("uv", str(Path.cwd() / "project"))
    assert environment.local_dir == "$SLURM_TMPDIR"


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ("kind: venv", "path must name a virtual environment for kind=venv"),
        ("kind: uv", "path must name a folder with a uv.lock for kind=uv"),
        ("kind: squashfs", "path must name an image file for kind=squashfs"),
        ("kind: module", "modules must name the modules that contain Python for kind=module"),
        ("modules: [a]", "modules are not loaded with kind=none: set kind, or use cluster.setup"),
        ("kind: module, modules: [--force]", "modules must hold names such as cuda/13.0, got '--force'"),
        (
            "kind: squashfs, path: /a, stage: false",
            "stage=false is not possible with kind=squashfs, which is unpacked on each node: set it to true",
        ),
        (
            "kind: venv, path: /a, uv_args: [--extra=train]",
            "uv_args are options of `uv sync`, but kind=venv: remove them, or set kind=uv",
        ),
        ("python: /usr/bin/python3", "python must be the name of a command, got '/usr/bin/python3'"),
        ("python: ''", "python must not be empty"),
        ("local_dir: scratch", "local_dir must be an absolute path or begin with a variable, got 'scratch'"),
        ("max_age_days: 0", "max_age_days must be > 0, got 0.0"),
        ('local_dir: "/a\\nb"', r"local_dir must be one line without control characters, got '/a\nb'"),
    ],
)
def test_mistakes_in_the_environment(write: Write, environment: str, problem: str) -> None:
    found = problems(write(f"cluster: {{environment: {{{environment}}}}}\n"))
    assert any(line.endswith(f"cluster.environment.{problem}") for line in found), found


def test_environment_outlives_the_longest_job(write: Write) -> None:
    text = "cluster: {time_limit_min: 2880, environment: {kind: venv, path: /a, max_age_days: %d}}\n"
    assert any("environment.max_age_days must be > 2, got 2.0" in line for line in problems(write(text % 2)))
    load_config(write(text % 3))


def test_environment_and_container_exclude_each_other(write: Write) -> None:
    found = problems(write("container: {runtime: podman, image: a}\ncluster: {environment: {kind: venv, path: /a}}\n"))
    assert any(
        "cluster.environment.kind=venv and container.runtime=podman exclude each other: set one of them to none" in line
        for line in found
    ), found
