"""Detection of nodes that do not answer: refused connections are answers, silence after an answer is a loss."""

from __future__ import annotations

import errno
import socket
import time

import pytest
from hpcdist_runs import unused_port, wait_for

from hpcdist.slurm.job import elastic
from hpcdist.slurm.job.elastic import HostProbe, addresses_of

#: Addresses of this machine, where connections are refused.
HOSTS = {"n1": "127.0.0.1", "n2": "127.0.0.2"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the probe in a list with one element."""
    now = [1000.0]
    monkeypatch.setattr(elastic.time, "monotonic", lambda: now[0])
    return now


def test_refused_and_accepted_connections_are_answers(clock: list[float]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        probe = HostProbe(HOSTS, listener.getsockname()[1])
        for _ in range(40):
            assert probe.silent() == []
            clock[0] += 0.5
        assert all(node.answered is not None for node in probe._nodes.values())
        probe.close()


def test_node_that_stops_answering_is_silent_and_one_that_never_answered_is_not(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = HostProbe({**HOSTS, "n3": "127.0.0.3"}, unused_port())
    never = [probe._nodes["n3"]]
    real = socket.socket.connect_ex

    def connect_ex(connection: socket.socket, address: tuple[str, int]) -> int:
        return errno.EHOSTUNREACH if address[0] in lost else real(connection, address)

    lost = {never[0].address[0]}
    monkeypatch.setattr(elastic.socket, "socket", type("Socket", (socket.socket,), {"connect_ex": connect_ex}))
    for _ in range(20):
        assert probe.silent() == []
        clock[0] += 0.5
    lost.add(HOSTS["n2"])
    began = clock[0]
    while probe.silent() == []:
        clock[0] += 0.5
        assert clock[0] < began + 10
    assert probe.silent() == ["n2"]
    assert elastic.SILENT_S <= clock[0] - began <= elastic.SILENT_S + 2 * elastic.PROBE_EVERY_S
    assert probe.silent(30.0) == []
    lost.discard(HOSTS["n2"])
    clock[0] += elastic.PROBE_EVERY_S
    probe.silent()
    assert probe.silent() == [], "it answers again"
    # After a pause of this process nothing is known about the nodes.
    clock[0] += 100
    assert probe.silent() == []
    lost.add(HOSTS["n2"])
    for _ in range(10):  # calls that are far apart detect it as well, only later
        clock[0] += 2 * elastic.PAUSE_S
        silent = probe.silent()
    assert silent == ["n2"]
    probe.close()


def test_names_without_an_address_are_left_out() -> None:
    assert addresses_of(["localhost", "no-such-node.invalid"]).keys() == {"localhost"}


def test_real_clock_and_connections() -> None:
    probe = HostProbe(HOSTS, unused_port())
    wait_for(lambda: probe.silent() == [] and all(node.answered for node in probe._nodes.values()), "answers")
    assert time.monotonic() >= max(node.answered or 0.0 for node in probe._nodes.values())
    probe.close()
