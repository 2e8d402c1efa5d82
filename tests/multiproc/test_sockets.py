"""The store's gate, signed RPC messages, and the comparison of gloo's connections; SECURITY.md has the table."""

from __future__ import annotations

import logging
import os
import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from hpcdist_runs import unused_port
from torch.distributed import HashStore, TCPStore

from hpcdist.errors import HpcdistError, RendezvousError
from hpcdist.rank.network import own_sockets, store_gate
from hpcdist.rank.network.peer_admission import admit_group
from hpcdist.rank.network.rpc_torch import _SignedPickler
from hpcdist.rank.network.store_gate import StoreServer, check_proof, open_relay, prove

KEY, OTHER = bytes(32), bytes([1] * 32)
HERE = "127.0.0.1"


def client(port: int) -> TCPStore:
    return TCPStore(HERE, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))


def test_store_requires_the_key_of_the_attempt(caplog: pytest.LogCaptureFixture) -> None:
    port = unused_port()
    server = StoreServer((HERE, port), KEY, "token", world_size=2, timeout=timedelta(seconds=10))
    idle = [socket.create_connection((HERE, port)) for _ in range(2 * store_gate.NUM_PENDING)]

    def connect() -> socket.socket:
        sock = socket.create_connection((HERE, port))
        prove(sock, KEY, b"token")
        return sock

    ours = client(open_relay(server.connect))
    theirs = client(open_relay(connect))
    ours.set("key", "value" * 100_000)
    assert theirs.get("key") == b"value" * 100_000
    assert theirs.clone().get("key")[:5] == b"value", "copies of the store are authenticated too"
    assert theirs.add("count", 2) == ours.add("count", 0)

    with caplog.at_level(logging.WARNING, "hpcdist.rank.network.store_gate"):
        for wrong, token in ((OTHER, b"token"), (KEY, b"another")):
            with socket.create_connection((HERE, port), timeout=20) as foreign, pytest.raises(ConnectionError):
                prove(foreign, wrong, token)
        with socket.create_connection((HERE, port)) as foreign:
            foreign.settimeout(20)
            foreign.sendall(b"\0" * 64)
            assert len(foreign.recv(32)) == 32
            assert foreign.recv(32) == b""
    assert len([record for record in caplog.records if "without this attempt's key" in record.message]) <= 1
    daemon = server._daemon.address
    with pytest.raises(TimeoutError):
        socket.create_connection(daemon, timeout=0.3)
    for sock in idle:
        sock.close()


def test_gate_without_the_key_is_refused() -> None:
    with socket.create_server((HERE, 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()

    def forge_proof() -> None:
        theirs.sendall(bytes(32))
        theirs.recv(64, socket.MSG_WAITALL)
        theirs.sendall(bytes(32))

    threading.Thread(target=forge_proof).start()
    with pytest.raises(RendezvousError, match="it does not know this attempt's key"):
        prove(ours, KEY, b"token")
    ours.close()
    with theirs, pytest.raises(ConnectionError, match="closed before the proof"):
        check_proof(theirs, KEY, b"token")


def test_rpc_message_without_valid_signature_is_refused() -> None:
    ours, theirs = _SignedPickler(KEY), _SignedPickler(OTHER)
    content, tensors = ours.serialize(["text", torch.ones(2)])
    found: Any = ours.deserialize(content, tensors)
    assert found[0] == "text"
    assert found[1].tolist() == [1.0, 1.0]
    for pickler, message in ((theirs, content), (ours, content[:-1] + b"!"), (ours, b""), (ours, content[32:])):
        with pytest.raises(HpcdistError, match="an RPC message is not signed with this attempt's key"):
            pickler.deserialize(message, tensors)


def test_foreign_connection_to_a_group_is_refused_and_fails_it_after_sending_data(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for data in (b"", b"12345678"):
        before = own_sockets.inodes()
        with socket.create_server((HERE, 0)) as listener, socket.socket() as peer, socket.socket() as foreign:
            peer.connect(listener.getsockname())
            accepted = [listener.accept()[0]]
            # Both ends are in this process, so the foreign end is excluded from the listing.
            foreign.bind((HERE, 0))
            before |= {os.fstat(foreign.fileno()).st_ino}
            foreign.connect(listener.getsockname())
            accepted.append(listener.accept()[0])
            foreign.sendall(data)
            store = HashStore()
            if data:
                with pytest.raises(RendezvousError, match="and sent data, but is not a rank of this run"):
                    admit_group(store, 0, 1, before)
            else:
                admit_group(store, 0, 1, before)
                assert foreign.recv(1) == b""
                peer.sendall(b"on")
                assert accepted[0].recv(2) == b"on"
                with pytest.raises(TimeoutError):
                    socket.create_connection(listener.getsockname(), timeout=0.3)
            for sock in accepted:
                sock.close()
        assert caplog.text.count("which is not a rank of this run") == 1
