"""Tests of the facts of this machine: versions, ports, name lookups, network interfaces."""

from __future__ import annotations

import errno
import os
import runpy
import socket
import threading
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import hpcdist
from hpcdist.host import machine
from hpcdist.host.machine import Lookups


def test_versions_equal_those_of_the_installed_packages() -> None:
    found = machine.versions()
    assert found["hpcdist"] == hpcdist.__version__
    assert found["source"] == machine.source_digest(str(Path(hpcdist.__file__).parent))
    # The version file is executed, because importing torch takes a second.
    torch = runpy.run_path(str(distribution("torch").locate_file("torch/version.py")))
    assert found["torch"] == torch["__version__"]
    assert found.get("cuda") == torch["cuda"], "the file also contains the name cuda in its list of exports"
    if torch["cuda"]:
        assert found["nccl"] == distribution(f"nvidia-nccl-cu{torch['cuda'].partition('.')[0]}").version


def test_listener_of_a_port_is_identified() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert machine.listener(port).startswith(f"pid {os.getpid()} (")
    assert machine.listener(port) == ""


def test_hidden_process_of_a_listener_leaves_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_connections", lambda kind: [])
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert machine.listener(server.getsockname()[1]) == f"a program of {psutil.Process().username()}"


def test_lookups_have_address_time_or_error() -> None:
    found = Lookups(["localhost", "no-such-host.invalid"], reverse=["localhost"]).result(30.0)
    assert found["localhost"]["address"] == "127.0.0.1"
    assert found["localhost"]["forward_s"] >= 0
    assert "reverse_s" in found["localhost"]
    assert found["no-such-host.invalid"]["error"]


def test_slow_lookup_is_abandoned_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(socket, "gethostbyname", lambda name: answered.wait())
    assert Lookups(["n1"], reverse=[]).result(0.0) == {"n1": {"late": 0.0}}
    answered.set()


def test_interfaces_have_state_and_speed_and_exclude_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(text: str, family: int = socket.AF_INET) -> SimpleNamespace:
        return SimpleNamespace(address=text, family=family)

    addresses = {
        "lo": [address("127.0.0.1")],
        "eth0": [address("10.0.0.3"), address("fe80::1", socket.AF_INET6)],
        "ib0": [address("10.1.0.3")],
        "eth1": [address("00:16:3e:00:00:01", psutil.AF_LINK)],
    }
    states = {name: SimpleNamespace(isup=True, speed=1000) for name in addresses}
    states["ib0"] = SimpleNamespace(isup=False, speed=0)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    assert machine.interfaces() == [
        {"name": "eth0", "address": "10.0.0.3", "up": True, "speed_mbit": 1000},
        {"name": "ib0", "address": "10.1.0.3", "up": False, "speed_mbit": None},
    ]


def test_interfaces_are_unknown_if_their_state_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))

    monkeypatch.setattr(psutil, "net_if_stats", fail)
    assert machine.interfaces() == []


def test_network_variables_exclude_all_others() -> None:
    env = {"NCCL_DEBUG": "INFO", "HOME": "/root", "GLOO_SOCKET_IFNAME": "eth0", "SECRET_TOKEN": "x"}
    assert machine.network_variables(env) == {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0"}
