"""A real HTTP server that receives the events of runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATH = "/services/T00/B00/s3cretpath"
#: The part of the address that no other user may see.
SECRET = "s3cretpath"


class Webhook(ThreadingHTTPServer):
    """Records the bodies of POST requests, and answers with the next of `statuses`, then with 200."""

    daemon_threads = True

    def __init__(self, host: str) -> None:
        super().__init__((host, 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.url = f"http://{host}:{self.server_port}{PATH}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Webhook)
        assert self.path == PATH
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if status == 200:
            self.server.bodies.append(body)
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def listening_webhook(host: str = "127.0.0.1") -> Iterator[Webhook]:
    """Listen on an address of this machine."""
    with Webhook(host) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
