"""Selection of the network interface by the routing table of this machine."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from hpcdist.errors import TopologyError
from hpcdist.rank.private_network import INTERFACE_VARIABLES, interface_env


def test_interface_with_the_route_to_the_master_is_selected() -> None:
    assert interface_env("127.0.0.1", {}) == dict.fromkeys(INTERFACE_VARIABLES, "lo")


def test_variables_that_are_set_are_kept() -> None:
    env = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": ""}
    assert interface_env("127.0.0.1", env) == {"NCCL_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}


def test_master_is_not_resolved_if_all_variables_are_set() -> None:
    assert interface_env("no.such.host.invalid", dict.fromkeys(INTERFACE_VARIABLES, "eth0")) == {}


def test_address_of_no_interface_selects_none(monkeypatch: pytest.MonkeyPatch) -> None:
    other = [SimpleNamespace(family=socket.AF_INET, address="192.0.2.1")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth7": other})
    assert interface_env("127.0.0.1", {}) == {}


def test_unresolvable_master_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, f"{name} not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    problem = (
        r"^the master 'n1' cannot be reached from .* \(.*n1 not known\): does its name resolve on every node\? HPC"
    )
    with pytest.raises(TopologyError, match=problem):
        interface_env("n1", {})
