"""The admission of clients to the sockets between nodes: a proof of the attempt's key, and limits for clients without.

ZeroMQ reads a frame before it knows who sends it, and holds any number of connections. Large frames are refused
(`frame_parts.py`), a connection without the proof is closed after a while, and while there are many of these, the
kernel drops the packets of new ones: a client that knows the key repeats them and connects later.

References: https://rfc.zeromq.org/spec/26/ (CurveZMQ), https://rfc.zeromq.org/spec/27/ (ZAP)
"""

import ctypes
import hmac
import logging
import os
import socket
import struct
from contextlib import suppress

import zmq
import zmq.utils.z85
from zmq.utils.monitor import recv_monitor_message

from hpcdist.rank.frame_parts import MAX_FRAME_BYTES

log = logging.getLogger(__name__)
#: Time for a client to prove that it knows the key, in ms. A busy node may need seconds.
PROOF_MS = 20_000
#: With this number of connections without the proof, new ones wait: each may occupy the memory of a frame. If more
#: ranks connect at once, the run starts a few seconds later.
MAX_UNPROVED = 512
NO_PROOF = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | NO_PROOF
#: Number of requests and of events that are read at most before connections are counted.
_MOST_AT_ONCE = 100
#: Answers of ZAP, which it takes from HTTP.
_ADMITTED = b"200"
_REFUSED = b"400"
#: Linux's options of a socket, which Python's `socket` lacks.
_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
#: A program of the Berkeley packet filter: `BPF_RET | BPF_K`, return 0 bytes of each packet.
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)


class CurveKeys:
    """The key pairs of servers and clients for one purpose in one attempt. Both follow from the attempt's key."""

    def __init__(self, key: bytes, purpose: str) -> None:
        self._server = _secret_key(key, f"{purpose}/server")
        self._client = _secret_key(key, f"{purpose}/client")
        self._server_public = zmq.curve_public(self._server)
        self._client_public = zmq.curve_public(self._client)

    def be_client(self, sock: zmq.Socket[bytes]) -> None:
        """Let a socket connect only to servers that know the key. Call it before `connect`."""
        sock.maxmsgsize = MAX_FRAME_BYTES
        sock.curve_serverkey = self._server_public
        sock.curve_publickey = self._client_public
        sock.curve_secretkey = self._client

    def be_server(self, sock: zmq.Socket[bytes]) -> None:
        """Let a socket accept only clients that an `Admission` admits. Call it before `bind`."""
        sock.maxmsgsize = MAX_FRAME_BYTES
        sock.handshake_ivl = PROOF_MS
        sock.curve_server = True
        sock.curve_secretkey = self._server
        sock.zap_domain = b"hpcdist"
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler, ZeroMQ would otherwise accept every key

    def is_of_client(self, public: bytes) -> bool:
        """Return whether a public key, of 32 bytes, is that of the clients."""
        return zmq.utils.z85.encode(public) == self._client_public


def _secret_key(key: bytes, name: str) -> bytes:
    """Derive a secret key for CURVE from the attempt's key."""
    return zmq.utils.z85.encode(hmac.digest(key, name.encode(), "sha256"))


class Admission:
    """Admits clients that know the key to a socket that will be bound to a TCP port; one per context.

    Clients are admitted only by calls of `process`.

    Attributes:
        sockets: the sockets that `process` reads. The caller polls them.
    """

    def __init__(self, sock: zmq.Socket[bytes], keys: CurveKeys) -> None:
        self._socket = sock
        self._keys = keys
        keys.be_server(sock)
        self._zap: zmq.Socket[bytes] = sock.context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        self._events: zmq.Socket[bytes] = sock.context.socket(zmq.PAIR)
        self._events.linger = 0
        self._events.rcvhwm = 0  # with a limit, ZeroMQ's thread waits for us at that number of events
        sock.monitor("inproc://admission", _EVENTS)
        self._events.connect("inproc://admission")
        self.sockets = (self._zap, self._events)
        self._listener: socket.socket | None = None
        self._num_open = 0  #: connections that are not closed
        self._num_admitted = 0  #: clients that were admitted, including those that have left
        self._is_paused = False  #: whether the kernel drops the packets of new connections
        self._has_refused = False  #: whether a client without the key was refused

    def process(self) -> None:
        """Admit clients that have proved that they know the key, and count the others.

        Call it when one of the sockets is ready.
        """
        with suppress(zmq.Again):
            for _ in range(_MOST_AT_ONCE):
                self._admit(self._zap.recv_multipart(zmq.NOBLOCK))
        with suppress(zmq.Again):
            for _ in range(_MOST_AT_ONCE):
                event = recv_monitor_message(self._events, zmq.NOBLOCK)
                self._note(event["event"], event["value"], event["endpoint"].decode())
        num_unproved = self._num_open - self._num_admitted
        is_full = num_unproved >= MAX_UNPROVED
        if is_full != self._is_paused and self._listener is not None:
            self._is_paused = is_full
            with suppress(OSError):  # on a kernel without filters, only the number of open files is a limit
                _drop_packets(self._listener, is_full)

    def _admit(self, request: list[bytes]) -> None:
        version, number, _, _, _, mechanism, *public = request
        status = _REFUSED
        if mechanism == b"CURVE" and self._keys.is_of_client(public[0]):
            self._num_admitted += 1
            status = _ADMITTED
        self._zap.send_multipart([version, number, status, b"", b"", b""])

    def _note(self, event: int, descriptor: int, endpoint: str) -> None:
        """Process an event of the socket; `descriptor` is that of the listener or of a connection."""
        if not endpoint.startswith("tcp://"):
            return
        if event == zmq.EVENT_LISTENING:
            self._listener = socket.socket(fileno=os.dup(descriptor))
        elif event == zmq.EVENT_ACCEPTED:
            self._num_open += 1
        elif event == zmq.EVENT_DISCONNECTED:
            self._num_open -= 1
        elif event & NO_PROOF and not self._has_refused:
            self._has_refused = True  # only once, so that an attacker cannot fill the log
            port = endpoint.rpartition(":")[2]
            log.warning("refused a connection to port %s without this attempt's key", port)

    def close(self) -> None:
        """Close the sockets, and the listener's descriptor; the admitted socket stays open."""
        self._socket.disable_monitor()
        for sock in self.sockets:
            sock.close()
        if self._listener is not None:
            self._listener.close()


def _drop_packets(listener: socket.socket, is_full: bool) -> None:
    """Let the kernel drop the packets of new connections if `is_full`, otherwise let it accept them again.

    Existing connections are not affected.
    """
    if not is_full:
        listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        return
    log.warning(
        "port %d has %d connections of clients that have not proved that they know this attempt's key: new ones wait",
        listener.getsockname()[1],
        MAX_UNPROVED,
    )
    program = ctypes.create_string_buffer(_DROP_ALL)
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
