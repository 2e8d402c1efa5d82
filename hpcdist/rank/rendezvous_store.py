"""The store of the ranks: a server thread in rank 0, and a client that torch's C++ code calls like its own stores.

torch's `TCPStore` serves every client that connects. This store uses ZeroMQ instead. The ranks of one machine meet at
a Unix socket in the attempt folder, which only their user can reach. Ranks on several nodes meet at the rendezvous
address; CURVE authenticates both sides with keys that are derived from the attempt's key, and encrypts the connection.

A request is a list of frames: the operation and its arguments. The answer is a list of frames, of which the first is
`ok`, or an error message. Both are sent in parts (`frame_parts.py`).
"""

import itertools
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import zmq
from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]  # torch exports them at run time
from zmq.utils.monitor import recv_monitor_message

from hpcdist.errors import PeerLost, RendezvousError
from hpcdist.rank.admission import NO_PROOF, Admission, CurveKeys
from hpcdist.rank.frame_parts import join_all, split_all

log = logging.getLogger(__name__)
SOCKET_NAME = "store.sock"
#: Longest time limit, in seconds: a poll lasts at most 2**31 ms.
MAX_WAIT_S = 1e6
#: Additional time for the answer of a request that waits for keys, in seconds.
_ANSWER_S = 20.0
#: First frame of an answer that is no error message.
_OK = b"ok"
#: Answers to a yes-or-no question, which the client converts by `bool`.
_YES = b"1"
_NO = b""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The place at which the ranks of one attempt meet: a Unix socket in `folder`, or a TCP port if `keys` is set."""

    token: str
    folder: Path
    host: str = ""
    port: int = 0
    keys: CurveKeys | None = None
    has_remote_ranks: bool = True

    def __str__(self) -> str:
        if self.keys is None:
            return str(self.folder / SOCKET_NAME)
        return f"{self.host}:{self.port}"

    def endpoint(self, *, to_bind: bool = False) -> str:
        """Return the endpoint in ZeroMQ's notation. Raises OSError if the host name is not known."""
        if self.keys is None:
            # The path of a Unix socket is limited to 107 bytes. The descriptor stays open.
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            return f"ipc:///proc/self/fd/{descriptor}/{SOCKET_NAME}"
        *_, resolved = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        address = str(resolved[0])
        if to_bind and self.has_remote_ranks and address.startswith("127."):
            # On Debian a host name resolves to loopback on its own host, and to an address elsewhere.
            address = "*"
        if ":" in address:  # IPv6
            address = f"[{address}]"
        return f"tcp://{address}:{self.port}"


def has_unix_sockets(folder: Path) -> bool:
    """Return whether the file system of a folder supports Unix sockets. FUSE and SMB may not."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    path = f"/proc/self/fd/{descriptor}/{os.getpid()}-{time.monotonic_ns()}.sock"
    try:
        with socket.socket(socket.AF_UNIX) as trial:
            trial.bind(path)
            os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


class _Waiting(NamedTuple):
    """A request for keys that do not exist yet."""

    client: bytes
    keys: list[bytes]
    until: float  #: time limit, on the monotonic clock
    wants_values: bool


class StoreServer(threading.Thread):
    """Serves the store in rank 0 until the process ends. Raises RendezvousError if it cannot listen."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], meeting: Meeting) -> None:
        super().__init__(name="hpcdist-store", daemon=True)
        self._values: dict[bytes, bytes] = {}
        self._waiting: list[_Waiting] = []
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._meeting = meeting
        self._admission: Admission | None = None
        if meeting.keys is not None:
            self._admission = Admission(self._socket, meeting.keys)
            for sock in self._admission.sockets:
                self._poller.register(sock, zmq.POLLIN)
        try:
            self._socket.bind(meeting.endpoint(to_bind=True))
        except (OSError, zmq.ZMQError) as error:
            context.destroy(linger=0)
            raise RendezvousError(f"rank 0 cannot listen on {meeting}: {os.strerror(error.errno or 0)}") from error

    def run(self) -> None:
        """Serve requests; the thread calls it and never returns."""
        while True:
            ready = dict(self._poller.poll(self._poll_ms()))
            if self._admission is not None and not ready.keys().isdisjoint(self._admission.sockets):
                self._admission.process()
            if self._socket in ready:
                self._serve_request()
            self._answer_waiting()

    def _poll_ms(self) -> int | None:
        """Return the time until the first time limit of a waiting request; None if no request waits."""
        if not self._waiting:
            return None
        left_s = min(request.until for request in self._waiting) - time.monotonic()
        return max(0, math.ceil(1000 * left_s))

    def _answer_waiting(self) -> None:
        """Answer the requests for keys that exist by now, and those after their time limit."""
        now = time.monotonic()
        waiting = self._waiting
        self._waiting = []
        for request in waiting:
            missing = [key for key in request.keys if key not in self._values]
            if missing and now < request.until:
                self._waiting.append(request)
            elif missing:
                text = f"no rank has set {missing[0].decode(errors='replace')!r} within the time limit"
                self._answer(request.client, [text.encode()])
            elif request.wants_values:
                self._answer(request.client, [_OK, *(self._values[key] for key in request.keys)])
            else:
                self._answer(request.client, [_OK])

    def _serve_request(self) -> None:
        client, *parts = self._socket.recv_multipart()
        if parts[:1] != [b""]:
            return  # not a request of ZeroMQ, so its client expects no answer
        try:
            operation, arguments = _parsed(parts[1:])
            answer = self._execute(client, operation, arguments)
        except ValueError as error:
            answer = [str(error).encode()]
        if answer is not None:
            self._answer(client, answer)

    def _answer(self, client: bytes, frames: Sequence[bytes]) -> None:
        self._socket.send_multipart([client, b"", *split_all(frames)])

    def _execute(self, client: bytes, operation: str, arguments: list[bytes]) -> list[bytes] | None:
        """Return the answer, or None if the client must wait for keys. Raises ValueError for a malformed request."""
        values = self._values
        match operation, arguments:
            case "set", pairs:
                if len(pairs) % 2:
                    raise ValueError("keys and values of different number")
                values.update(zip(pairs[::2], pairs[1::2], strict=True))
                return [_OK]
            case (("get" | "wait"), [limit_s, *keys]):
                until = time.monotonic() + _time_limit(limit_s)
                self._waiting.append(_Waiting(client, keys, until, wants_values=operation == "get"))
                return None
            case "add", [key, amount]:
                total = int(values.get(key, b"0")) + int(amount)
                values[key] = b"%d" % total
                return [_OK, values[key]]
            case "append", [key, value]:
                values[key] = values.get(key, b"") + value
                return [_OK]
            case "check", keys:
                have_all = all(key in values for key in keys)
                return [_OK, _YES if have_all else _NO]
            case "compare_set", [key, expected, desired]:
                if values.get(key, b"") == expected:
                    values[key] = desired
                return [_OK, values.get(key, expected)]
            case "delete", [key]:
                has_existed = values.pop(key, None) is not None
                return [_OK, _YES if has_existed else _NO]
            case "count", []:
                return [_OK, b"%d" % len(values)]
        raise ValueError(f"the store has no operation {operation[:40]!r} with {len(arguments)} arguments")


def _parsed(parts: Sequence[bytes]) -> tuple[str, list[bytes]]:
    """Return the operation and the arguments of a request. Raises ValueError if it is malformed."""
    frames = join_all(parts)
    if not frames:
        raise ValueError("a request without an operation")
    return frames[0].decode(), frames[1:]


def _time_limit(text: bytes) -> float:
    """Return the seconds of a request. Raises ValueError if they are no finite number."""
    limit_s = float(text)
    if not math.isfinite(limit_s):
        raise ValueError(f"a time limit of {limit_s} s")
    return min(limit_s, MAX_WAIT_S)


class _Connection:
    """One connection to the server, which one thread uses at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], meeting: Meeting, endpoint: str) -> None:
        self._meeting = meeting
        self._socket = context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, 1000)  # sending waits for ever once a connection was refused
        self._socket.setsockopt(zmq.IPV6, 1)
        # Milliseconds until it tries to connect again: first these, then more and more up to the maximum.
        self._socket.setsockopt(zmq.RECONNECT_IVL, 5)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 250)
        if meeting.keys is not None:
            meeting.keys.be_client(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | NO_PROOF)
        self._was_connected = False
        self._has_answered = False
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(endpoint)

    def ask(self, request: Sequence[bytes], limit_s: float) -> list[bytes]:
        """Return the answer to a request. Raises OSError if rank 0 cannot be reached, RendezvousError if it refuses."""
        until = time.monotonic() + limit_s
        with suppress(zmq.Again):  # the events of the monitor show the reason
            self._socket.send_multipart(split_all(request))
        foreign = f"the program at {self._meeting} is not rank 0 of this attempt ({self._meeting.token})"
        while True:
            left_s = until - time.monotonic()
            ready = dict(self._poller.poll(max(0, round(1000 * left_s))))
            if not ready:
                break
            if self._socket in ready:
                self._has_answered = True
                return join_all(self._socket.recv_multipart())
            self._was_connected = True
            if recv_monitor_message(self._monitor)["event"] != zmq.EVENT_CONNECTED:
                if self._has_answered or self._meeting.keys is None:
                    raise PeerLost(f"rank 0 has ended, and with it the store at {self._meeting}")
                raise RendezvousError(f"{foreign}: it does not know this attempt's key")
        if self._has_answered:
            raise PeerLost(f"rank 0 does not answer: it did not process a request within {limit_s:g} s")
        if self._was_connected:
            raise RendezvousError(f"{foreign}: it did not answer within {limit_s:g} s")
        # ZeroMQ does not report why no connection was made.
        if self._meeting.keys is None:
            (self._meeting.folder / SOCKET_NAME).lstat()
        else:
            socket.create_connection((self._meeting.host, self._meeting.port), timeout=1.0).close()
        raise TimeoutError("timed out")

    def close(self) -> None:
        """Close the connection; requests that are not answered are lost."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()


class RendezvousStore(Store):
    """A client of rank 0's store. Any number of threads may use it, also those of torch.

    The methods are those of `torch.distributed.Store`. torch's C++ code looks them up by name on the class, and
    `self.timeout` belongs to it.
    """

    #: torch keeps only the C++ part of a store, and its threads may call it until the process ends.
    _all: ClassVar[list["RendezvousStore"]] = []

    def __init__(self, meeting: Meeting, timeout: timedelta, *, serve: bool) -> None:
        """Connect to rank 0, or be it. Raises RendezvousError, or OSError if nothing listens."""
        super().__init__()
        self._meeting = meeting
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        if serve:
            StoreServer(self._context, meeting).start()
        self._endpoint = meeting.endpoint()
        #: Connections that no thread uses now.
        self._idle: list[_Connection] = []
        self.set_timeout(timeout)
        try:
            self._ask("count")
        except BaseException:
            if not serve:  # otherwise the thread uses it
                self._context.destroy(linger=0)
            raise
        self._all.append(self)

    def _limit_s(self, timeout: timedelta | None = None) -> float:
        if timeout is None:
            timeout = self.timeout  # type: ignore[attr-defined]  # torch's stubs lack it
        return min(float(timeout.total_seconds()), MAX_WAIT_S)

    def _ask(self, operation: str, *arguments: str | bytes, wait_s: float | None = None) -> list[bytes]:
        """Return the values of rank 0's answer. Raises DistStoreError if the answer is an error message.

        Args:
            wait_s: how long rank 0 waits for the keys of the request; None for a request that it answers at once.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = _Connection(self._context, self._meeting, self._endpoint)
        frames = [operation.encode()]
        for argument in arguments:
            frames.append(argument.encode() if isinstance(argument, str) else argument)
        limit_s = self._limit_s()
        if wait_s is not None:
            limit_s = wait_s + _ANSWER_S
        try:
            status, *values = connection.ask(frames, limit_s)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        if status != _OK:
            raise DistStoreError(status.decode(errors="replace"))
        return values

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask("set", *itertools.chain.from_iterable(zip(keys, values, strict=True)))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all keys exist, and return their values. Raises DistStoreError after the store's time limit."""
        limit_s = self._limit_s()
        return self._ask("get", str(limit_s), *keys, wait_s=limit_s)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist. Raises DistStoreError after the time limit, by default that of the store."""
        limit_s = self._limit_s(timeout)
        self._ask("wait", str(limit_s), *keys, wait_s=limit_s)

    def add(self, key: str, amount: int) -> int:
        """Add to the number of a key, which begins at 0, and return the sum."""
        return int(self._ask("add", key, str(amount))[0])

    def append(self, key: str, value: str | bytes) -> None:
        """Add to the end of a key's value, which begins empty."""
        self._ask("append", key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist now."""
        return bool(self._ask("check", *keys)[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if its value is `expected`, which is empty for a key that does not exist; return its new value."""
        return self._ask("compare_set", key, expected, desired)[0]

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it existed."""
        return bool(self._ask("delete", key)[0])

    def num_keys(self) -> int:
        return int(self._ask("count")[0])

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> Self:
        return self  # other threads may use it

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815  # the names that torch's C++ code looks up
