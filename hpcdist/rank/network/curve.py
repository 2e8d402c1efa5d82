"""CURVE for ZeroMQ sockets between the ranks: both sides prove that they know the attempt's key; data is encrypted.

Reference: https://rfc.zeromq.org/spec/26/ (CurveZMQ), https://rfc.zeromq.org/spec/27/ (ZAP)
"""

from __future__ import annotations

import hmac

import zmq
import zmq.utils.z85


class CurveKeys:
    """The key pairs of servers and clients for one purpose in one attempt. Both follow from the attempt's key."""

    def __init__(self, key: bytes, purpose: str) -> None:
        self._server, self._client = (
            zmq.utils.z85.encode(hmac.digest(key, f"{purpose}/{side}".encode(), "sha256"))
            for side in ("server", "client")
        )
        self._server_public, self._client_public = map(zmq.curve_public, (self._server, self._client))

    def be_client(self, sock: zmq.Socket[bytes]) -> None:
        """Let a socket connect only to servers that know the key. Call it before `connect`."""
        sock.curve_serverkey = self._server_public
        sock.curve_publickey, sock.curve_secretkey = self._client_public, self._client

    def be_server(self, sock: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """Let a socket accept only clients that know the key. Call it before `bind`, once per context.

        Returns the socket at which ZeroMQ asks about each client. Without an answer (`admit`) nobody is accepted.
        """
        sock.curve_server = True
        sock.curve_secretkey = self._server
        sock.zap_domain = b"hpcdist"
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler, ZeroMQ would otherwise accept every key
        zap: zmq.Socket[bytes] = sock.context.socket(zmq.REP)
        zap.linger = 0
        zap.bind("inproc://zeromq.zap.01")
        return zap

    def admit(self, zap: zmq.Socket[bytes]) -> None:
        """Answer whether a client may connect."""
        version, number, _, _, _, mechanism, *public = zap.recv_multipart()
        knows_key = mechanism == b"CURVE" and zmq.utils.z85.encode(public[0]) == self._client_public
        zap.send_multipart([version, number, b"200" if knows_key else b"400", b"", b"", b""])
