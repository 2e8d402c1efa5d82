"""TCP sockets of this process and their packet filters."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from hpcdist.rank.network import own_sockets
from hpcdist.rank.network.own_sockets import attach, detach, tcp_sockets

HERE = "127.0.0.1"


def connected(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(listener.getsockname(), timeout=5)
    server, _ = listener.accept()
    server.settimeout(0.3)
    return client, server


def test_no_data_filter_holds_data_until_it_is_detached() -> None:
    with socket.create_server((HERE, 0)) as listener:
        attach(listener, own_sockets.NO_DATA)
        client, server = connected(listener)
        with client, server:
            client.sendall(b"early")
            with pytest.raises(TimeoutError):
                server.recv(9)
            detach(server)
            server.settimeout(30)
            assert server.recv(9) == b"early", "retransmitted by the kernel"
            detach(server)  # has no effect the second time


def test_nothing_filter_refuses_new_connections_and_keeps_established_ones() -> None:
    with socket.create_server((HERE, 0)) as listener:
        client, server = connected(listener)
        attach(listener, own_sockets.NOTHING)
        with pytest.raises(TimeoutError):
            socket.create_connection(listener.getsockname(), timeout=0.3)
        with client, server:
            client.sendall(b"known")
            assert server.recv(9) == b"known"


def test_only_from_filter_passes_given_ports_of_one_address() -> None:
    with socket.create_server((HERE, 0)) as listener, socket.socket() as ours, socket.socket() as theirs:
        ours.bind((HERE, 0))
        port = ours.getsockname()[1]
        attach(listener, own_sockets.only_from(HERE, [1, port]))
        theirs.bind(("127.0.0.2", port))
        theirs.settimeout(0.3)
        with pytest.raises(TimeoutError):
            theirs.connect(listener.getsockname())
        ours.settimeout(30)
        ours.connect(listener.getsockname())


def test_connections_are_listed_with_both_addresses() -> None:
    with socket.create_server((HERE, 0)) as listener, socket.socket() as ours:
        before = own_sockets.inodes()
        ours.connect(listener.getsockname())
        local, peer = ours.getsockname(), listener.getsockname()
        assert own_sockets.connections_to(peer[1]) == {local}, "includes connections that are not accepted yet"
        server, _ = listener.accept()
        with server:
            ours.sendall(b"four")
            server.recv(4)
            with tcp_sockets() as found:
                new = {(own.local, own.peer): own for own in found if own.inode not in before}
                assert new.keys() >= {(local, peer), (peer, local)}
                assert new[peer, local].bytes_received == 4
                assert new[local, peer].bytes_received == 0
                new[peer, local].refuse()
            assert ours.recv(1) == b""
            assert own_sockets.is_own_connection(local, peer)
            assert not own_sockets.is_own_connection(("127.0.0.1", 1), peer)


@pytest.mark.processes
def test_connections_of_other_processes_are_not_own() -> None:
    with socket.create_server((HERE, 0)) as listener:
        code = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); sys.stdin.read()"
        command = [sys.executable, "-c", code, str(listener.getsockname()[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
            server, peer = listener.accept()
            with server:
                assert not own_sockets.is_own_connection(peer, server.getsockname())
            assert other.stdin is not None
            other.stdin.close()
