"""Probes as real processes, each on a loopback address of its own, and what they tell of each other."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcdist.preflight.mesh import ALL_PAIRS, MEASURED_ROUNDS, Mesh
from hpcdist.preflight.node_checks import check_nodes
from hpcdist.preflight.probe import Request, answer_lines, probe_command, probe_env, read_answers
from hpcdist.preflight.protocol import connected

#: Far more than a probe takes, so that a hang is told as one.
LIMIT_S = 60


def request_for(folder: Path, num_nodes: int) -> Request:
    nodes = tuple(f"n{number}" for number in range(1, num_nodes + 1))
    witness = folder / "preflight" / "witness"
    witness.parent.mkdir()
    witness.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return Request(
        nodes=nodes,
        port=port,
        token="secret",
        run_folder=str(folder),
        checkpoint_folder=str(folder / "checkpoints"),
        witness=str(witness),
        addresses={node: f"127.0.0.{number}" for number, node in enumerate(nodes, 2)},
    )


class Probes:
    """Probes that have been started; all are gone when the test ends."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[str]] = {}

    def start(self, request: Request, node: str) -> None:
        self._running[node] = subprocess.Popen(
            probe_command(request),
            env={**os.environ, "SLURMD_NODENAME": node, **probe_env(request)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def answers(self) -> dict[str, dict[str, Any]]:
        told = ""
        for node, process in self._running.items():
            said, errors = process.communicate(timeout=LIMIT_S)
            assert (process.returncode, errors) == (0, ""), node
            told += said
        return read_answers(told)

    def end(self) -> None:
        for process in self._running.values():
            process.kill()
            process.communicate()


@pytest.fixture
def probes() -> Iterator[Probes]:
    found = Probes()
    yield found
    found.end()


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.processes
def test_healthy_nodes_reach_each_other_though_one_starts_before_the_others(tmp_path: Path, probes: Probes) -> None:
    request = request_for(tmp_path, 4)
    probes.start(request, "n2")
    wait_for((tmp_path / "preflight" / "started-n2").exists)
    for node in ("n1", "n3", "n4"):
        probes.start(request, node)
    answers = probes.answers()
    assert set(answers) == set(request.nodes)
    pairs = {
        (one, other): answers[one]["network"]["peers"][other] for one in answers for other in answers if one != other
    }
    assert {peer["status"] for peer in pairs.values()} == {"ok"}
    assert all(abs(peer["offset_s"]) < 1 for peer in pairs.values()), "one machine has one clock"
    measured = {
        pair for pair, peer in pairs.items() if {"latency_s", "sent_bytes_s", "received_bytes_s"} <= peer.keys()
    }
    assert measured == {(one, other) for one, other in pairs if one < other}, "the first one of each pair"
    assert not any("ephemeral" in peer or "stalled" in peer for peer in pairs.values())
    assert all(answer["witness"] and answer["checkpoints"]["bytes_s"] > 0 for answer in answers.values())
    assert [check.level for check in check_nodes(request, answers) if check.level == "failure"] == []
    assert list(tmp_path.iterdir()) == [tmp_path / "preflight"], "what was written for a speed is gone"


@contextmanager
def stranger(address: str, port: int, greeting: bytes) -> Iterator[None]:
    """Something that greets whoever connects, as mail and ssh servers do."""
    with closing(socket.create_server((address, port))) as server:

        def greet() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)  # closing a socket with unread bytes would take the greeting back
                    connection.sendall(greeting)

        thread = threading.Thread(target=greet)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.processes
def test_whoever_cannot_be_reached_is_told_apart(tmp_path: Path, probes: Probes) -> None:
    """n3 does not listen though it has started; n4's port is taken; on n5's is a probe of another job; n6 is n1."""
    request = request_for(tmp_path, 7)
    addresses = {node: address for node, address in request.addresses.items() if node != "n7"}
    request = replace(
        request,
        nodes=(*request.nodes[:6], "n7.invalid"),
        addresses={**addresses, "n6": request.addresses["n1"]},
    )
    for node in request.nodes[2:]:
        (tmp_path / "preflight" / f"started-{node}").touch()
    text = b"[" * 1000  # too deep for a parser, if anything parsed it
    hello = b"hpf2" + bytes(16) + struct.pack(">H32s", len(text), bytes(32)) + text
    with (
        stranger(request.addresses["n4"], request.port, b"220 ready when you are\r\n"),
        stranger(request.addresses["n5"], request.port, hello),
    ):
        for node in ("n1", "n2", "n4"):
            probes.start(request, node)
        answers = probes.answers()
    for node in ("n1", "n2", "n4"):
        peers = answers[node]["network"]["peers"]
        assert peers["n3"] == {"status": "refused"}
        assert peers["n5"] == {"status": "stranger", "detail": "a probe of another job"}
        assert peers["n6"] == {"status": "stranger", "detail": "n1, to which the name n6 resolves"}
        assert peers["n7.invalid"]["status"] == "unresolved"
        if node != "n4":
            assert peers["n4"] == {"status": "stranger", "detail": "another program"}
    assert answers["n1"]["network"]["peers"]["n2"]["sent_bytes_s"] > 0, "the others are measured all the same"
    assert answers["n4"]["network"]["port_problem"] == "Address already in use"
    assert answers["n4"]["network"]["listener"], "one of those that listen on this port of this machine's addresses"
    found = [
        (check.name, check.node) for check in check_nodes(request, answers) if check.level in ("failure", "warning")
    ]
    assert found == [("answer", ""), ("port", "n4")], "the four that gave none in one, and who keeps n4 from listening"


@pytest.mark.processes
def test_strangers_on_the_port_change_no_finding(tmp_path: Path, probes: Probes) -> None:
    """Idle connections, garbage, JSON that is too deep to parse, a hello without the token, and a peer's own hello."""
    request = request_for(tmp_path, 2)
    probes.start(request, "n1")
    wait_for((tmp_path / "preflight" / "started-n1").exists)
    where = request.addresses["n1"], request.port
    deep = b"[" * 1000
    forged = b"hpf2" + bytes(16) + struct.pack(">H32s", len(deep), bytes(32)) + deep
    greetings = [
        b"",
        b"hpf1" + struct.pack(">H", 65535) + b"[" * 65535,
        b"GET / HTTP/1.1\r\n\r\n" * 50,
        forged,
        b"hpf2",
    ]
    with ExitStack() as held:
        reflected = held.enter_context(socket.create_connection(where))
        reflected.sendall(reflected.recv(20))
        reflected.sendall(reflected.recv(65536))
        for number in range(400):
            sock = held.enter_context(socket.create_connection(where))
            with suppress(ConnectionError):
                sock.sendall(greetings[number % len(greetings)])
        probes.start(request, "n2")
        answers = probes.answers()
    peers = {node: answers[node]["network"]["peers"] for node in answers}
    assert peers["n1"]["n2"]["status"] == peers["n2"]["n1"]["status"] == "ok"
    assert {"latency_s", "sent_bytes_s", "received_bytes_s"} <= peers["n1"]["n2"].keys()
    refused = answers["n1"]["network"]["strangers"]
    assert refused > 100
    assert "strangers" not in answers["n2"]["network"]
    found = check_nodes(request, answers)
    assert [check for check in found if check.level in ("failure", "warning")] == []
    assert [(check.node, check.level, check.text) for check in found if check.name == "port"] == [
        ("n1", "note", f"{refused:,} connections to port {request.port} came from other programs and were closed")
    ]


def test_answers_that_are_damaged_are_left_out() -> None:
    deep = "[" * 100_000
    text = f"hpcdist-preflight n1 0/1 {deep}\nhpcdist-preflight n2 0/1 [1]\nhpcdist-preflight n3 5/1 {{}}\n"
    assert read_answers(f"{text}hpcdist-preflight n4 0/1 {'9' * 5000}\nhpcdist-preflight n5 {'9' * 5000}/1 1") == {}


def test_a_connection_that_is_made_counts_though_nobody_had_time_to_look() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        asyncio.run(connected("127.0.0.1", server.getsockname()[1], limit_s=0.0)).close()


def test_packets_that_vanish_are_told_from_refusals() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address, port = full.getsockname()
        waiting = [socket.create_connection((address, port))]  # nobody accepts: the queue has room for one
        with pytest.raises(TimeoutError):
            asyncio.run(connected(address, port, limit_s=0.2))
        waiting[0].close()
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(connected(address, port, limit_s=5.0))


@pytest.mark.processes
def test_a_node_that_is_none_of_the_job_says_so(tmp_path: Path) -> None:
    request = request_for(tmp_path, 2)
    command, env = probe_command(request), {**os.environ, "SLURMD_NODENAME": "n9", **probe_env(request)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "hpcdist: this is n9, which is none of n1, n2\n"


async def nowhere(name: str) -> str:
    raise OSError(name)


def test_in_large_runs_each_node_meets_some_that_are_spread_evenly_and_meet_it_too() -> None:
    nodes = [f"n{number}" for number in range(151)]
    met = {
        node: set(Mesh(nodes, node, port=1, token="t", resolve=nowhere, mark=lambda: None, marks=list).peers)
        for node in nodes
    }
    assert all(node in met[other] for node in nodes for other in met[node])
    assert all(MEASURED_ROUNDS < len(others) < ALL_PAIRS for others in met.values())
    near = [sum(abs(int(node[1:]) - int(other[1:])) % 151 < 30 for other in met[node]) for node in nodes]
    assert max(near) < ALL_PAIRS / 2, "not its neighbours alone, which may share a switch"


def test_an_answer_survives_srun_labels_and_other_output() -> None:
    answers = {"n1": {"text": "ö " * 3000}, "n2": {"text": "short"}}
    lines = [(task, line) for task, node in enumerate(answers) for line in answer_lines(node, answers[node])]
    assert max(len(line.encode()) for _, line in lines) < 1000, "srun cuts after 1,024 bytes"
    mixed = sorted(lines, key=lambda item: item[1][-1])
    for text in (
        "".join(f"{line}\n" for _, line in lines),
        "some banner\n" + "".join(f" {task}: {line}\n" for task, line in mixed),
    ):
        assert read_answers(text) == answers


def test_an_answer_that_was_cut_short_is_none() -> None:
    lines = answer_lines("n1", {"text": "a" * 3000})
    assert read_answers("\n".join(lines[:-1])) == {}


def test_a_request_survives_the_command_line(tmp_path: Path) -> None:
    request = replace(request_for(tmp_path, 3), checkpoint_bytes=7, mode="full")
    command = probe_command(request, "python3")
    assert command[:4] == ["python3", "-P", "-m", "hpcdist.preflight.probe"]
    assert Request.from_json(command[4], request.token) == request
    assert request.token not in command[4], "other users can read command lines"
    assert json.loads(command[4])["nodes"] == ["n1", "n2", "n3"]


@pytest.mark.processes
def test_a_probe_needs_the_standard_library_alone() -> None:
    """It starts on every node before anything else does, and also where torch is what is broken."""
    code = (
        "import sys, hpcdist.preflight.probe, hpcdist.preflight.node_checks\n"
        "print([name for name in ('torch', 'psutil', 'numpy', 'omegaconf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
