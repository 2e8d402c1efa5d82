"""Connections of gloo and TensorPipe: only those between the run's own ranks, and none after all are made.

Neither library authenticates a peer. So the ranks compare notes through their store, which only they can write: a
connection that a rank accepted is a peer's if that peer lists the same connection as its own. Then the listening
sockets are closed to everyone by a filter.

gloo connects all pairs in a group's constructor and reads nothing but a number from a connection before the first
collective, so its connections are compared afterwards (`admit_group`). TensorPipe answers requests as soon as it
listens, so nothing of what a peer sends reaches it before its connection is known (`RpcAdmission`).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]

from hpcdist.errors import RendezvousError
from hpcdist.rank.network import own_sockets
from hpcdist.rank.network.own_sockets import Address, OwnSocket

log = logging.getLogger(__name__)
#: A connection as one end sees it: its own address and the other's.
Connection = tuple[Address, Address]
_Gloo = distributed_c10d.ProcessGroupGloo


def _listing(sockets: Iterable[OwnSocket]) -> str:
    return json.dumps([(own.local, own.peer) for own in sockets if own.peer is not None])


def _accepted(listings: Iterable[bytes]) -> set[Connection]:
    """What the other ends of all listed connections look like."""
    found = set()
    for listing in listings:
        for local, peer in json.loads(listing):
            found.add(((peer[0], peer[1]), (local[0], local[1])))
    return found


def admit_group(store: Store, rank: int, size: int, before: frozenset[int]) -> None:
    """Compare a new group's connections with its other ranks', and close its listening sockets to newcomers.

    Args:
        store: of this group alone.
        before: sockets that were open before the group was made.

    Raises RendezvousError where something else than a rank has sent data.
    """
    with own_sockets.tcp_sockets() as found:
        new = [own for own in found if own.inode not in before]
        listening = [own for own in new if own.peer is None]
        store.set(f"connections/{rank}", _listing(new))
        known = _accepted(store.get(f"connections/{other}") for other in range(size))
        for own in listening:
            own_sockets.attach(own.sock, own_sockets.NOTHING)
        _refuse_strangers(listening, known)


def _refuse_strangers(listening: Iterable[OwnSocket], known: set[Connection]) -> None:
    doors = {own.local for own in listening}
    with own_sockets.tcp_sockets() as found:
        for own in found:
            if own.peer is None or own.local not in doors or (own.local, own.peer) in known:
                continue
            if own.bytes_received:
                raise RendezvousError(
                    f"{_name(own.peer)} has connected to {_name(own.local)} and sent data, but is no rank of this run:"
                    " another program, or a network that translates addresses between the nodes"
                )
            log.warning("refused a connection from %s, which is no rank of this run", _name(own.peer))
            own.refuse()


def _name(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


class _AdmittingGloo(_Gloo):
    """A gloo group whose connections are compared before it is used."""

    def __init__(self, store: Store, rank: int, size: int, *arguments: Any, **options: Any) -> None:
        before = own_sockets.inodes()
        super().__init__(store, rank, size, *arguments, **options)
        admit_group(PrefixStore("admission", store), rank, size, before)


def guard_gloo() -> None:
    """Have every gloo group that this process makes from now on admit its own ranks alone."""
    # Connections that are made at first use would find the listening sockets closed.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    distributed_c10d.ProcessGroupGloo = _AdmittingGloo  # type: ignore[misc]
    dist.ProcessGroupGloo = _AdmittingGloo  # type: ignore[misc]


class RpcAdmission:
    """Admits the ranks' TensorPipe connections while RPC starts.

    The kernel accepts connections, but drops all data on them until both ends are known; the sender sends it again
    after 0.2 s.

    Args:
        store: of this start of RPC alone.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._before = own_sockets.inodes()
        self._doors: set[Address] = set()
        self._admitted: set[int] = set()
        self._ready = threading.Event()
        self._failed = threading.Event()

    def begin(self) -> None:
        """Take what is open now for no part of RPC; call it just before RPC begins to listen."""
        self._before = own_sockets.inodes()

    def shut(self) -> None:
        """Let no data into the sockets that have begun to listen; call it before anyone is told their addresses.

        Raises RendezvousError where someone was faster.
        """
        with own_sockets.tcp_sockets() as found:
            for own in found:
                if own.peer is None and own.inode not in self._before and own.local not in self._doors:
                    own_sockets.attach(own.sock, own_sockets.NO_DATA)
                    self._doors.add(own.local)
        for _, port in self._doors:
            if strangers := own_sockets.connections_to(port):
                raise RendezvousError(
                    f"{_name(min(strangers))} connected to port {port} of rank {self._rank} before any rank was told of"
                    " it: another program of this machine"
                )

    @contextmanager
    def open(self) -> Iterator[None]:
        """Admit connections until every rank has left this block; then close the listening sockets to newcomers."""
        failures: list[BaseException] = []

        def work() -> None:
            try:
                self._admit_until_ready()
            except BaseException as error:  # raised again in the block's thread
                failures.append(error)

        thread = threading.Thread(target=work, name="hpcdist-admission", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            self._failed.set()
            raise
        self._store.add("ready", 1)
        self._ready.set()
        thread.join()
        if failures:
            raise failures[0]

    def _admit_until_ready(self) -> None:
        pause_s = 0.002 * max(2, self._size)
        published = ""
        while not self._failed.is_set():
            is_last = self._ready.is_set() and self._store.add("ready", 0) == self._size
            with own_sockets.tcp_sockets() as found:
                new = [own for own in found if own.inode not in self._before]
                if (listing := _listing(new)) != published:
                    self._store.set(f"connections/{self._rank}", listing)
                    published = listing
                keys = [f"connections/{other}" for other in range(self._size)]
                known = _accepted(self._store.get(key) for key in keys if self._store.check([key]))
                for own in new:
                    if own.local in self._doors and own.inode not in self._admitted and (own.local, own.peer) in known:
                        own_sockets.detach(own.sock)
                        self._admitted.add(own.inode)
                if is_last:
                    doors = [own for own in new if own.peer is None and own.local in self._doors]
                    for own in doors:
                        if own_sockets.can_filter():
                            own_sockets.attach(own.sock, own_sockets.NOTHING)
                        else:
                            # TensorPipe takes this for an error of the socket, warns, and stops to listen on it.
                            own.sock.shutdown(socket.SHUT_RDWR)
                    self._end_strangers(known)
                    return
            time.sleep(pause_s)  # nothing tells when a library opens a connection

    def _end_strangers(self, known: set[Connection]) -> None:
        with own_sockets.tcp_sockets() as found:
            for own in found:
                if own.peer is not None and own.local in self._doors and (own.local, own.peer) not in known:
                    log.warning("refused a connection from %s, which is no rank of this run", _name(own.peer))
                    own.refuse()
