"""Admission of peers: only ranks of this run may connect to the sockets of gloo.

gloo does not authenticate a peer. The ranks therefore exchange lists of their connections through their store, which
only ranks can access. A connection that a rank has accepted is genuine if another rank lists it too. gloo connects all
pairs in a group's constructor, and reads only a number from a connection before the first collective. The connections
are compared after the constructor, and the listening sockets are closed.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
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
            own.stop_listening()
        _refuse_strangers({own.local for own in listening}, known)


def _refuse_strangers(listening: set[Address], known: set[Connection]) -> None:
    with own_sockets.tcp_sockets() as found:
        for own in found:
            if own.peer is None or own.local not in listening or (own.local, own.peer) in known:
                continue
            if own.bytes_received:
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
