"""Caches, proxies and certificates of the user's environment in the containers of ranks."""

from pathlib import Path
from typing import Any

import pytest

from hpcdist.config.cluster_schema import ContainerConfig
from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import DataConfig
from hpcdist.containers.inherited import inherited
from hpcdist.containers.mounts import Mount
from hpcdist.containers.runtimes import outer_env
from hpcdist.containers.spec import ContainerSpec, rank_container
from hpcdist.job import submit
from hpcdist.run.folder import RunDir

PROXIES = {"https_proxy": "http://proxy:3128", "HTTP_PROXY": "http://proxy:3128", "no_proxy": "localhost"}


def mount(path: Path, **how: Any) -> Mount:
    return Mount(source=str(path), target=str(path), **how)


def spec_of(env: dict[str, str], runtime: Any = "apptainer", **parts: Any) -> ContainerSpec:
    config = Config(container=ContainerConfig(runtime=runtime, image="/i.sif"), **parts)
    spec = rank_container(config, RunDir(Path("/runs/e/r")), env, cwd=Path("/p"), root=Path("/p"))
    assert spec is not None
    return spec


@pytest.mark.lost_night
@pytest.mark.parametrize("runtime", ["apptainer", "enroot", "pyxis"])
def test_caches_proxies_and_certificates_reach_each_runtime(tmp_path: Path, runtime: str) -> None:
    certificate = tmp_path / "ca.pem"
    certificate.touch()
    env = {**PROXIES, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "1", "TORCH_HOME": str(tmp_path)}
    env["SSL_CERT_FILE"] = str(certificate)
    env["HUGGING_FACE_HUB_TOKEN"] = "hf_x"  # the older name
    passed = outer_env(spec_of(env, runtime), {**env, "PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "x"})
    assert passed.items() >= env.items()
    assert "AWS_SECRET_ACCESS_KEY" not in passed
    assert passed["PYTHONNOUSERSITE"] == "1"
    assert "hf_x" not in str(spec_of(env, runtime))


def test_path_of_a_variable_is_mounted(tmp_path: Path) -> None:
    certificate = tmp_path / "ca.pem"
    certificate.touch()
    (tmp_path / "hf").mkdir()
    env = {"HF_HOME": str(tmp_path / "hf"), "REQUESTS_CA_BUNDLE": str(certificate)}
    assert inherited(env, (), ()).mounts == (mount(certificate, read_only=True), mount(tmp_path / "hf"))
    assert mount(tmp_path / "hf") in spec_of(env).mounts
    assert inherited(env, (), [mount(tmp_path)]).mounts == ()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("/no/such", "/no/such does not exist here"),
        ("/etc", "/etc is a folder of the system, and the image has its own"),
        ("/home", "the dotfiles in /home would replace settings of the image"),
        ("/a:/b", "runtimes cannot mount /a:/b"),
    ],
)
def test_variable_with_an_invisible_path_is_left_out(value: str, why: str) -> None:
    env = {"HOME": "/home/ada", "HF_HOME": value, "TORCH_HOME": value, "HF_HUB_OFFLINE": "1"}
    spec = spec_of(env)
    assert spec.inherited.notes == [f"the container does not get HF_HOME, TORCH_HOME: {why}"]
    assert spec.inherited.names == ("HF_HUB_OFFLINE",)
    assert outer_env(spec, env).keys() == {"HF_HUB_OFFLINE", "HOME", "PYTHONNOUSERSITE"}
    assert not any(mount.source == value for mount in spec.mounts)


def test_path_that_the_config_sets_is_the_users_own() -> None:
    spec = spec_of({"HF_HOME": "/in/the/image"}, launch=LaunchConfig(env={"HF_HOME": "/in/the/image"}))
    assert (spec.inherited.names, spec.inherited.notes) == ((), [])
    assert outer_env(spec, {"HF_HOME": "/in/the/image"})["HF_HOME"] == "/in/the/image"


@pytest.mark.processes
@pytest.mark.usefixtures("nothing_to_inherit")
def test_dry_run_names_the_inherited_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", "/no/such")
    config = Config(
        name="x",
        runs_dir="/runs",
        data=DataConfig(root="/data"),
        container=ContainerConfig(runtime="apptainer", image="/i.sif"),
    )
    assert submit.shown_step(config, "srun x").splitlines() == [
        "# srun x",
        "# the container gets HF_TOKEN of your environment",
        "# the container does not get HF_HOME: /no/such does not exist here",
    ]
