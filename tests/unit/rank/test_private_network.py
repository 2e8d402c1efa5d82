"""The network namespace of the ranks of a local run."""

from __future__ import annotations

import ctypes
import json
import os
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hpcdist.config.schema import Config, DataConfig, TrainerConfig
from hpcdist.errors import TopologyError
from hpcdist.rank import private_network
from hpcdist.rank.private_network import INTERFACE_VARIABLES, interface_env

_PR_SET_DUMPABLE = 4


def in_child(function: Callable[[], Any], uid: int) -> Any:
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            if uid != os.geteuid():
                "host".encode("idna")  # imported while this process may read it
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
                ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)  # as after the start of a program
            os.write(writer, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader, "rb") as pipe:
        return json.loads(pipe.read())


@pytest.mark.parametrize("uid", [os.geteuid(), 65534])
def test_loopback_of_a_rank_is_its_own(uid: int) -> None:
    if uid != os.geteuid() and os.geteuid() != 0:
        pytest.skip("only root can be another user")
    if private_network.why_refused():
        pytest.skip("this kernel or container refuses network namespaces")

    def enter() -> list[Any]:
        with socket.create_server(("127.0.0.1", 0)) as outside:
            counters = private_network.card_counters()
            private_network.enter()
            with socket.create_server(("127.0.0.1", 0)) as inside:
                socket.create_connection(inside.getsockname()).close()
            return [
                private_network.is_private(),
                os.geteuid(),
                [name for _, name in socket.if_nameindex()],
                socket.socket().connect_ex(outside.getsockname()) != 0,
                len(private_network.card_counters().splitlines()) == len(counters.splitlines()),
            ]

    assert in_child(enter, uid) == [True, uid, ["lo"], True, True]
    assert not private_network.is_private()


def test_only_trainers_without_downloads_have_it() -> None:
    assert private_network.is_wanted(Config())
    assert not private_network.is_wanted(Config(data=DataConfig(name="cifar10")))
    assert private_network.is_wanted(Config(data=DataConfig(name="cifar10", download=False)))
    assert not private_network.is_wanted(Config(trainer=TrainerConfig(target="mine:train")))
    assert not private_network.is_wanted(Config(trainer=TrainerConfig(script=["train.py"])))


# --- Selection of the network interface by the routing table of this machine.


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
