"""Admission of peers: only ranks of this run may connect to the sockets of gloo.

gloo does not authenticate a peer. The ranks therefore exchange lists of their connections through their store, which
only ranks can access. A connection that a rank has accepted is genuine if another rank lists it too. gloo connects all
pairs in a group's constructor, and reads only a number from a connection before the first collective. The connections
are compared after the constructor, and the listening sockets are closed. A stranger that has sent data may have taken
the place of a rank: the ranks then agree through the store to create the group again.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]

from hpcdist.errors import RendezvousError
from hpcdist.rank.network import own_sockets
from hpcdist.rank.network.own_sockets import Address, OwnSocket

log = logging.getLogger(__name__)
#: The local address and the peer's address of a connection.
Connection = tuple[Address, Address]
#: How often a group is created before its creation fails.
NUM_ATTEMPTS = 100
#: Time limit for the connections of a group whose ranks are all ready.
CONNECT_TIMEOUT = timedelta(seconds=30)
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


def admit_group(store: Store, rank: int, size: int, before: frozenset[int], error: str = "") -> None:
    """Compare a new group's connections with the lists of its other ranks, and close its listening sockets.

    Either all ranks of the group return or all raise.

    Args:
        store: a store that only this group uses.
        rank: rank within the group.
        size: number of ranks in the group.
        before: inodes of the sockets that were open before the group was created.
        error: why this rank could not create the group.

    Raises RendezvousError if a rank has an error, or if a process that is not a rank has sent data to one.
    """
    with own_sockets.tcp_sockets() as found:
        new = [own for own in found if own.inode not in before]
        listening = [own for own in new if own.peer is None]
        store.set(f"connections/{rank}", _listing(new))
        known = _accepted(store.get(f"connections/{other}") for other in range(size))
        for own in listening:
            own.stop_listening()
        store.set(f"error/{rank}", error or _refuse_strangers({own.local for own in listening}, known))
    if errors := [text.decode() for other in range(size) if (text := store.get(f"error/{other}"))]:
        raise RendezvousError(errors[0])


def _refuse_strangers(listening: set[Address], known: set[Connection]) -> str:
    """Close the connections of processes that are not ranks; return an error if one of them has sent data."""
    error = ""
    with own_sockets.tcp_sockets() as found:
        for own in found:
            if own.peer is None or own.local not in listening or (own.local, own.peer) in known:
                continue
            if own.bytes_received:
                error = (
                    f"{_name(own.peer)} has connected to {_name(own.local)} and sent data, but is not a rank of this"
                    " run: it is another program, or the network translates addresses between the nodes"
                )
            else:
                log.warning("refused a connection from %s, which is not a rank of this run", _name(own.peer))
            own.refuse()
    return error


def _name(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


class _AdmittingGloo(_Gloo):
    """A gloo group that compares its connections before it is used.

    If a stranger has disturbed the group, all ranks drop it and create it again with other sockets. The time in which
    the sockets listen is short, since no rank begins before the others.
    """

    def __new__(cls, store: Store, rank: int, size: int, *arguments: Any, **options: Any) -> _AdmittingGloo:
        # A C++ object cannot be initialised twice, so each attempt needs a new one, which only `__new__` can return.
        timeout = options.get("timeout", distributed_c10d.default_pg_timeout)
        if "timeout" in options:
            options["timeout"] = min(timeout, CONNECT_TIMEOUT)
        for attempt in itertools.count(1):
            fresh = PrefixStore(f"admission/{attempt}", store)
            if fresh.add("ready", 1) == size:
                fresh.set("begin", "")
            fresh.wait(["begin"], timeout)
            try:
                group = cls._admitted(fresh, rank, size, arguments, options)
            except RendezvousError as error:
                if attempt == NUM_ATTEMPTS:
                    raise
                if attempt == 1:
                    log.warning("a process group is created again, up to %d times: %s", NUM_ATTEMPTS - 1, error)
            else:
                if "timeout" in options:
                    group._set_default_timeout(timeout)
                return group
        raise AssertionError

    @classmethod
    def _admitted(cls, store: Store, rank: int, size: int, arguments: Any, options: Any) -> _AdmittingGloo:
        before = own_sockets.inodes()
        group: _AdmittingGloo = super().__new__(cls)
        error = ""
        try:
            super().__init__(group, store, rank, size, *arguments, **options)
        except RuntimeError as problem:
            error = f"rank {rank} cannot create a process group: {problem}"
        admit_group(store, rank, size, before, error)
        return group

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: `__new__` has initialised the group."""


def guard_gloo() -> None:
    """Make every gloo group that this process creates from now on admit only its own ranks."""
    # The listening sockets are closed after the constructor, so connections must not be deferred to the first use.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    distributed_c10d.ProcessGroupGloo = _AdmittingGloo  # type: ignore[misc]
    dist.ProcessGroupGloo = _AdmittingGloo  # type: ignore[misc]
