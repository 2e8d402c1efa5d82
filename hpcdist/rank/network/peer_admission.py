"""Admission of peers: only ranks of this run may connect to the sockets of gloo and TensorPipe.

Neither library authenticates a peer. The ranks therefore exchange lists of their connections through their store, which
only ranks can access. A connection that a rank has accepted is genuine if another rank lists it too. Afterwards a
filter closes the listening sockets.

gloo connects all pairs in a group's constructor, and reads only a number from a connection before the first collective.
Its connections are compared after the constructor (`admit_group`). TensorPipe answers requests as soon as it listens,
so a filter holds back the data of each connection until it is known to be genuine (`RpcAdmission`).
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
#: The local address and the peer's address of a connection.
Connection = tuple[Address, Address]
_Gloo = distributed_c10d.ProcessGroupGloo


def _listing(sockets: Iterable[OwnSocket]) -> str:
    return json.dumps([(own.local, own.peer) for own in sockets if own.peer is not None])


def _accepted(listings: Iterable[bytes]) -> set[Connection]:
    """Return all listed connections as seen from their other ends."""
    found = set()
    for listing in listings:
        for local, peer in json.loads(listing):
            found.add(((peer[0], peer[1]), (local[0], local[1])))
    return found


def admit_group(store: Store, rank: int, size: int, before: frozenset[int]) -> None:
    """Compare a new group's connections with the lists of its other ranks, and close its listening sockets.

    Args:
        store: a store that only this group uses.
        rank: rank within the group.
        size: number of ranks in the group.
        before: inodes of the sockets that were open before the group was created.

    Raises RendezvousError if a process that is not a rank has sent data.
    """
    with own_sockets.tcp_sockets() as found:
        new = [own for own in found if own.inode not in before]
        listening = [own for own in new if own.peer is None]
        store.set(f"connections/{rank}", _listing(new))
        known = _accepted(store.get(f"connections/{other}") for other in range(size))
        for own in listening:
            own_sockets.attach(own.sock, own_sockets.NOTHING)
        _refuse_strangers({own.local for own in listening}, known, fail_on_data=True)


def _refuse_strangers(listening: set[Address], known: set[Connection], *, fail_on_data: bool) -> None:
    with own_sockets.tcp_sockets() as found:
        for own in found:
            if own.peer is None or own.local not in listening or (own.local, own.peer) in known:
                continue
            if fail_on_data and own.bytes_received:
                raise RendezvousError(
                    f"{_name(own.peer)} has connected to {_name(own.local)} and sent data, but is not a rank of this"
                    " run: it is another program, or the network translates addresses between the nodes"
                )
            log.warning("refused a connection from %s, which is not a rank of this run", _name(own.peer))
            own.refuse()


def _name(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


class _AdmittingGloo(_Gloo):
    """A gloo group that compares its connections before it is used."""

    def __init__(self, store: Store, rank: int, size: int, *arguments: Any, **options: Any) -> None:
        before = own_sockets.inodes()
        super().__init__(store, rank, size, *arguments, **options)
        admit_group(PrefixStore("admission", store), rank, size, before)


def guard_gloo() -> None:
    """Make every gloo group that this process creates from now on admit only its own ranks."""
    # The listening sockets are closed after the constructor, so connections must not be deferred to the first use.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    distributed_c10d.ProcessGroupGloo = _AdmittingGloo  # type: ignore[misc]
    dist.ProcessGroupGloo = _AdmittingGloo  # type: ignore[misc]


class RpcAdmission:
    """Admits the TensorPipe connections of the ranks while RPC starts.

    The kernel accepts connections but drops all data on them until both ends are known. The sender retransmits the data
    after 0.2 s.

    Args:
        store: a store that only this start of RPC uses.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._before = own_sockets.inodes()
        self._listening: set[Address] = set()
        self._admitted: set[int] = set()
        self._ready = threading.Event()
        self._failed = threading.Event()

    def begin(self) -> None:
        """Exclude the sockets that are open now; call it directly before RPC begins to listen."""
        self._before = own_sockets.inodes()

    def shut(self) -> None:
        """Drop data to the new listening sockets; call it before their addresses are published.

        Raises RendezvousError if another process has connected already.
        """
        with own_sockets.tcp_sockets() as found:
            for own in found:
                if own.peer is None and own.inode not in self._before and own.local not in self._listening:
                    own_sockets.attach(own.sock, own_sockets.NO_DATA)
                    self._listening.add(own.local)
        for _, port in self._listening:
            if strangers := own_sockets.connections_to(port):
                raise RendezvousError(
                    f"{_name(min(strangers))} connected to port {port} of rank {self._rank} before its address was"
                    " published: it is another program on this machine"
                )

    @contextmanager
    def open(self) -> Iterator[None]:
        """Admit connections until every rank has left this block; then close the listening sockets."""
        failures: list[BaseException] = []

        def work() -> None:
            try:
                self._admit_until_ready()
            except BaseException as error:  # re-raised in the thread of the block
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
                    if (
                        own.local in self._listening
                        and own.inode not in self._admitted
                        and (own.local, own.peer) in known
                    ):
                        own_sockets.detach(own.sock)
                        self._admitted.add(own.inode)
                if is_last:
                    listening = [own for own in new if own.peer is None and own.local in self._listening]
                    for own in listening:
                        if own_sockets.can_filter():
                            own_sockets.attach(own.sock, own_sockets.NOTHING)
                        else:
                            # TensorPipe treats this as a socket error, warns, and stops listening.
                            own.sock.shutdown(socket.SHUT_RDWR)
                    _refuse_strangers(self._listening, known, fail_on_data=False)
                    return
            time.sleep(pause_s)  # there is no event for a connection that a library opens
