"""Which interface is pinned: asked of this machine's own routing table."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from hpcdist.errors import TopologyError
from hpcdist.rank.network.network_interface import INTERFACE_VARIABLES, interface_env


def test_the_interface_that_leads_to_the_master() -> None:
    assert interface_env("127.0.0.1", {}) == dict.fromkeys(INTERFACE_VARIABLES, "lo")


def test_what_is_set_stays() -> None:
    env = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": ""}
    assert interface_env("127.0.0.1", env) == {"NCCL_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}


def test_where_all_are_set_nothing_is_looked_up() -> None:
    assert interface_env("no.such.host.invalid", dict.fromkeys(INTERFACE_VARIABLES, "eth0")) == {}


def test_an_address_of_no_interface_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    other = [SimpleNamespace(family=socket.AF_INET, address="192.0.2.1")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth7": other})
    assert interface_env("127.0.0.1", {}) == {}


def test_a_master_without_an_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, f"{name} not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    told = r"^the master 'n1' cannot be reached from .* \(.*n1 not known\): does its name resolve on every node\? HPC"
    with pytest.raises(TopologyError, match=told):
        interface_env("n1", {})
