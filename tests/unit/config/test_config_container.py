"""The section `container`."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import Write, problems

from hpcdist.config.loading import load_config


def test_site_profile_may_contain_the_container_section(write: Write, tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("partition: gpu\ncontainer: {runtime: podman, image: theirs, extra_args: [--cgroups=disabled]}\n")
    config = load_config(write("container: {image: mine}\n"), cluster=site)
    assert (config.cluster.partition, config.container.runtime) == ("gpu", "podman")
    assert (config.container.image, config.container.extra_args) == ("mine", ["--cgroups=disabled"])


@pytest.mark.parametrize(
    ("container", "image"),
    [
        ("runtime: apptainer, image: a.sif", "{cwd}/a.sif"),
        ("runtime: charliecloud, image: ~/a", "{home}/a"),
        ("runtime: pyxis, image: a.sqsh", "{cwd}/a.sqsh"),
        ("runtime: pyxis, image: nvcr.io#a/b:1", "nvcr.io#a/b:1"),
        ("runtime: podman, image: a/b", "a/b"),
        ("runtime: apptainer, image: 'docker://a/b'", "docker://a/b"),
    ],
)
def test_paths_of_image_files_become_absolute(write: Write, container: str, image: str) -> None:
    config = load_config(write(f"container: {{{container}}}\n"))
    assert config.container.image == image.format(cwd=Path.cwd(), home=Path.home())


@pytest.mark.parametrize(
    ("container", "problem"),
    [
        ("runtime: podman", "container.image must name the image to start"),
        (
            "runtime: podman, image: a, mounts: [data]",
            "container.mounts must be SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro with absolute paths, got 'data'",
        ),
        (
            "env: [TOKEN=abc]",
            "container.env must hold names such as WANDB_MODE or UCX_*, never values, got 'TOKEN'",
        ),
        (
            "runtime: charliecloud, image: a, mounts: ['/a:/b:ro']",
            "container.mounts: charliecloud has no read-only mounts: leave out ':ro'",
        ),
    ],
)
def test_mistakes_in_the_container_section_are_reported(write: Write, container: str, problem: str) -> None:
    assert problems(write(f"container: {{{container}}}\n")) == (problem,)


def test_unknown_runtime_is_reported_with_the_allowed_values(write: Write) -> None:
    (problem,) = problems(write("container: {runtime: singularity, image: a}\n"))
    assert problem.startswith("container.runtime must be one of none, docker, podman, apptainer, ")
    assert "got 'singularity'" in problem
    assert "\n" not in problem
