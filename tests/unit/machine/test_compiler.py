"""torch.compile without what it needs is refused before it starts."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from hpcdist.errors import ConfigError
from hpcdist.machine import compiler


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A PATH and a folder of headers, both empty."""
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    return tmp_path


def install(machine: Path, *names: str) -> None:
    for name in names:
        (machine / name).touch(mode=0o755)


@pytest.mark.parametrize(
    ("device", "there", "missing"),
    [
        ("cpu", (), "a C++ compiler (g++) and Python's headers (Python.h)"),
        ("cpu", ("gcc", "Python.h"), "a C++ compiler (g++)"),
        ("cpu", ("g++",), "Python's headers (Python.h)"),
        ("cuda", ("g++", "Python.h"), "a C compiler (gcc)"),
    ],
)
def test_what_is_missing_is_named(machine: Path, device: str, there: tuple[str, ...], missing: str) -> None:
    install(machine, *there)
    with pytest.raises(ConfigError) as raised:
        compiler.check(device, {"PATH": str(machine)})
    assert str(raised.value).startswith(f"model.compile=true needs {missing}, not found here: install g++")


@pytest.mark.parametrize(("device", "name"), [("cpu", "g++"), ("cuda", "clang")])
def test_where_all_is_there_nothing_is_said(machine: Path, device: str, name: str) -> None:
    install(machine, name, "Python.h")
    compiler.check(device, {"PATH": str(machine)})


def test_the_users_own_compiler_counts(machine: Path) -> None:
    install(machine, "mine", "Python.h")
    compiler.check("cpu", {"PATH": str(machine), "CXX": "mine -O1"})
    with pytest.raises(ConfigError):
        compiler.check("cpu", {"PATH": str(machine), "CXX": "absent"})
