"""Tests of the check for a compiler and headers, which torch.compile needs."""

from __future__ import annotations

import os
import sysconfig
import tempfile
from pathlib import Path

import pytest

from hpcdist.errors import ConfigError
from hpcdist.host.machine import cache_environment, require_compiler


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder that is both PATH and the folder of headers."""
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    return tmp_path


def install(machine: Path, *names: str) -> None:
    for name in names:
        (machine / name).touch(mode=0o755)


@pytest.mark.parametrize(
    ("device", "installed", "missing"),
    [
        ("cpu", (), "a C++ compiler (g++) and Python's headers (Python.h)"),
        ("cpu", ("gcc", "Python.h"), "a C++ compiler (g++)"),
        ("cpu", ("g++",), "Python's headers (Python.h)"),
        ("cuda", ("g++", "Python.h"), "a C compiler (gcc)"),
    ],
)
def test_missing_parts_are_named(machine: Path, device: str, installed: tuple[str, ...], missing: str) -> None:
    install(machine, *installed)
    with pytest.raises(ConfigError) as raised:
        require_compiler(device, {"PATH": str(machine)})
    assert str(raised.value).startswith(f"model.compile=true needs {missing}, not found here: install g++")


def is_accepted(device: str, env: dict[str, str]) -> bool:
    try:
        require_compiler(device, env)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(("device", "name"), [("cpu", "g++"), ("cuda", "clang")])
def test_complete_installation_is_accepted(machine: Path, device: str, name: str) -> None:
    assert not is_accepted(device, {"PATH": str(machine)})
    install(machine, name, "Python.h")
    assert is_accepted(device, {"PATH": str(machine)})


def test_compiler_of_the_environment_is_used(machine: Path) -> None:
    install(machine, "mine", "Python.h")
    assert is_accepted("cpu", {"PATH": str(machine), "CXX": "mine -O1"})
    assert not is_accepted("cpu", {"PATH": str(machine), "CXX": "absent"})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can plant a folder of another user")
def test_cache_that_another_user_may_have_filled_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o1777)
    run, ours, planted = tmp_path / "run", tmp_path / "torchinductor_0", tmp_path / "torchinductor_root"
    default = {"TORCHINDUCTOR_CACHE_DIR": str(planted)}
    elsewhere = {"TORCHINDUCTOR_CACHE_DIR": "/var/tmp/torchinductor_root"}
    assert cache_environment({"TORCHINDUCTOR_CACHE_DIR": "/data/cache"}, run) == {}
    for _ in range(2):  # the second run finds the cache of the first
        for env in ({}, default, elsewhere):
            assert cache_environment(env, run) == {"TORCHINDUCTOR_CACHE_DIR": str(ours)}
        assert ours.stat().st_mode & 0o777 == 0o700
    in_run = {"TORCHINDUCTOR_CACHE_DIR": str(run / "torchinductor")}
    ours.chmod(0o777)
    assert cache_environment({}, run) == in_run
    ours.chmod(0o700)
    os.chown(ours, 65534, 65534)
    assert cache_environment({}, run) == in_run
    ours.rmdir()
    ours.symlink_to(tmp_path)
    os.lchown(ours, 65534, 65534)
    assert cache_environment({}, run) == in_run
