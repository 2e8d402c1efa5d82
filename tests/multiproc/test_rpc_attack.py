"""RPC against others: a second user finds no door, malformed messages are ignored, and torch's RPC is not needed."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from context_scene import SINGLE_RANK, new_run, open_context
from hpcdist_runs import listening
from spawn import Rank, spawn_ranks

from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.schema import Config
from hpcdist.errors import ConfigError, HpcdistError
from hpcdist.rank.rendezvous_store import CurveKeys
from hpcdist.rank.rpc import rpc_group
from hpcdist.run.folder import RunDir

NOBODY = 65534
EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


def start_groups(here: Rank, path: Path, num_starts: int) -> dict[str, Any]:
    """Start RPC again and again; return the TCP ports of this rank and the answers."""
    ports, answers = set(), []
    with open_context(here, RunDir(path), Config()) as ctx:
        before = listening(os.getpid())
        for number in range(num_starts):
            with rpc_group(ctx, {"double": lambda value: 2 * value}) as group:
                ports |= listening(os.getpid()) - before
                answers.append(group.call(1 - ctx.rank, "double", number).result())
                ctx.barrier()
    return {"ports": ports, "answers": answers}


def besiege(path: Path, done: threading.Event, found: list[str]) -> None:
    """As another user, connect to every Unix socket that appears in the system, until `done`."""
    code = f"""if True:
        import os, socket, time
        os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
        seen = set()
        print("ready", flush=True)
        while not time.sleep(0.0005):
            for line in open("/proc/net/unix").read().splitlines()[1:]:
                name = line.split()[7:]
                if name and ("rpc-" in name[0]) and name[0] not in seen:
                    base = os.path.basename(name[0])
                    seen.add(name[0])
                    for target in (name[0], os.path.join({str(path)!r}, base)):
                        try:
                            socket.socket(socket.AF_UNIX).connect(target)
                            print("connected", target, flush=True)
                        except OSError as error:
                            print("refused", type(error).__name__, flush=True)
        """
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found.append(process.stdout.readline())
    reader = threading.Thread(target=lambda: found.extend(process.stdout or ()))
    reader.start()
    done.wait()
    process.kill()
    process.wait()
    reader.join()
    process.stdout.close()


@pytest.mark.parametrize("num_starts", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_another_user_can_connect_to_nothing_while_rpc_starts(tmp_path: Path, num_starts: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    run = new_run(tmp_path)
    done, found = threading.Event(), []
    attacker = threading.Thread(target=besiege, args=(run.path / "attempts" / "001", done, found))
    attacker.start()
    try:
        while not found:
            attacker.join(0.01)
        first, second = spawn_ranks(start_groups, 2, path=run.path, num_starts=num_starts)
    finally:
        done.set()
        attacker.join()
    assert first == second == {"ports": set(), "answers": [2 * number for number in range(num_starts)]}
    assert [line for line in found if line.startswith("connected")] == []
    assert [line for line in found if line.startswith("refused")], "the attacker has seen the sockets"


def test_malformed_messages_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    random.seed(0)
    valid = [0, 10**6, 0, "echo", {"tuple": [{"tensor": 0}]}, [["float32", [2], [0], False]]]
    with (
        caplog.at_level(logging.WARNING),
        open_context(SINGLE_RANK, new_run(tmp_path), Config()) as ctx,
        rpc_group(ctx, {"echo": lambda *values: values}) as group,
    ):
        peer = group.transport._peers[0]  # type: ignore[attr-defined]
        bad: list[Any] = [None, {}, [], [0] * 6, "x", [0, [], 0, "echo", [], []], [1, {}, 0, "", 0, []]]
        for index in range(6):
            bad += [[*valid[:index], value, *valid[index + 1 :]] for value in (None, -1, 99, "?", [], {}, [[]], 1e999)]
        for shape in ([3], [-2], [2**62, 8], ["2"], [1.0, 2.0]):
            bad.append([*valid[:5], [["float32", shape, list(range(len(shape))), False]]])
        text = json.dumps(valid).encode()
        raw = [json.dumps(content).encode() for content in bad] + [b"[" * 100_000, b"\xff\x00"]
        for _ in range(300):
            broken = bytearray(text)
            broken[random.randrange(len(text))] = random.randrange(256)
            raw.append(bytes(broken))
        for header in raw:
            for frames in ([], [b"12345678"], [b"1", b"2"]):
                with peer.lock:
                    peer.sock.send_multipart([header, *frames])
        assert group.call(0, "echo", torch.ones(2)).result()[0].tolist() == [1.0, 1.0]
        assert group.transport._num_malformed > 300  # type: ignore[attr-defined]
    assert caplog.text.count("RPC: ignored") == 1


def test_socket_of_another_node_requires_the_key_of_both_sides() -> None:
    context: zmq.Context[Any] = zmq.Context()
    ours, theirs = CurveKeys(bytes(32), "rpc/token"), CurveKeys(bytes([1] * 32), "rpc/token")
    server = context.socket(zmq.PULL)
    zap = ours.be_server(server)
    port = server.bind_to_random_port("tcp://127.0.0.1")

    def knock(keys: CurveKeys | None, server_key: bytes | None = None) -> bool:
        """Return whether a message of a client arrives."""
        with context.socket(zmq.PUSH) as client, closing(client.get_monitor_socket(EVENTS)) as monitor:
            client.linger = 0
            if keys is not None:
                keys.be_client(client)
            if server_key is not None:
                client.curve_serverkey = server_key
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send(b"hello")
            poller = zmq.Poller()
            for sock in (zap, monitor, server):
                poller.register(sock, zmq.POLLIN)
            until = time.monotonic() + 10
            while time.monotonic() < until:
                events = dict(poller.poll(1000))
                if zap in events:
                    ours.admit(zap)
                if server in events:
                    return bool(server.recv() == b"hello")
                if monitor in events:
                    number = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
                    if number == zmq.EVENT_DISCONNECTED:
                        return False
            raise AssertionError("neither accepted nor refused")

    assert knock(ours)
    assert not knock(None), "without CURVE"
    assert not knock(theirs), "it does not know the server"
    assert not knock(theirs, ours._server_public), "the server does not know it"
    assert knock(ours)
    context.destroy(linger=0)


def test_torch_rpc_is_refused_where_its_sockets_can_be_reached(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"launch.rpc=torch: every user and program .* launch.rpc_trusted_nodes"):
        spawn_ranks(open_torch_rpc, 2, path=new_run(tmp_path).path)
    assert ConfigError.exit_code == 2


def open_torch_rpc(here: Rank, path: Path) -> None:
    with open_context(here, RunDir(path), Config(launch=LaunchConfig(rpc="torch"))) as ctx, rpc_group(ctx):
        pass


def load_unsigned(here: Rank, path: Path) -> str:
    """Start torch's RPC with a pickler that checks nothing, as after a change in torch; return the error."""
    from hpcdist.rank import rpc_torch

    rpc_torch._SignedPickler = lambda _: rpc_torch.internal._InternalRPCPickler()  # type: ignore[assignment,misc]
    with open_context(here, RunDir(path), Config(launch=LaunchConfig(rpc="torch"))) as ctx:
        with pytest.raises(HpcdistError) as failed, rpc_group(ctx):
            pass
        return str(failed.value)


def test_signatures_that_are_not_checked_fail_the_start_of_torch_rpc(tmp_path: Path) -> None:
    (error,) = spawn_ranks(load_unsigned, 1, path=new_run(tmp_path).path)
    assert "loads pickles without hpcdist's signature" in error
