"""TCP sockets of this process."""

from __future__ import annotations

import socket

from hpcdist.rank import process_group
from hpcdist.rank.process_group import tcp_sockets

HERE = "127.0.0.1"


def test_connections_are_listed_with_both_addresses() -> None:
    with socket.create_server((HERE, 0)) as listener, socket.socket() as ours:
        before = process_group.inodes()
        ours.connect(listener.getsockname())
        local, peer = ours.getsockname(), listener.getsockname()
        server, _ = listener.accept()
        with server:
            with tcp_sockets() as found:
                new = {(own.local, own.peer): own for own in found if own.inode not in before}
                assert new.keys() >= {(local, peer), (peer, local)}
                new[peer, local].refuse()
            assert ours.recv(1) == b""
