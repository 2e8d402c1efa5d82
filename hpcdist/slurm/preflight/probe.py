"""The preflight probe, which runs on every node before the ranks: `python -P -m hpcdist.slurm.preflight.probe REQUEST`.

It examines its machine, its file systems and its connections to the other nodes, and prints the facts. node_checks.py
compares the facts of all nodes. The probe needs no torch, because it must start quickly and also work on a node where
torch is broken; psutil and pynvml are imported when their facts are read.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hpcdist.errors import HpcdistError
from hpcdist.host import machine, storage
from hpcdist.host.commands import done_within, start, within
from hpcdist.slurm.on_nodes import node_name, print_answer
from hpcdist.slurm.preflight.mesh import Mesh

#: Time until another machine's file is visible on a network file system.
WITNESS_S = 3.0
#: Limit of a file system's answer.
FOLDER_S = 5.0
#: Limit of a name lookup; torch makes several before ranks have met.
LOOKUP_S = 5.0
#: Bytes written to measure the speed, and the time limit.
WRITE = {"quick": (4 * 2**20, 1.5), "full": (128 * 2**20, 5.0)}
#: Maximum number of nodes that write.
WRITERS = 64
_TOKEN = "HPCDIST_PREFLIGHT_TOKEN"  # noqa: S105  # a name


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """The parameters of the preflight on every node."""

    mode: Literal["quick", "full"] = "quick"  #: `full` writes and sends more
    nodes: tuple[str, ...]  #: all nodes by their Slurm names, in the order of the run
    port: int  #: port of the probes; it should be the one that rank 0 will listen on
    token: str  #: secret that authenticates probes of the same job; not on the command line
    run_folder: str  #: the folder that every node must see
    checkpoint_folder: str  #: it may not exist yet
    witness: str  #: a file with the token, in a folder of this preflight inside the run folder
    checkpoint_bytes: int | None = None  #: size of the newest checkpoint, None without one
    gpus_per_node: int = 0  #: GPUs that ranks need on each node
    tasks_per_node: int = 1  #: ranks on each node
    num_workers: int = 0  #: processes that load data, for each rank
    backend: str = "gloo"  #: backend of the ranks: `nccl`, `gloo` or `mpi`
    addresses: Mapping[str, str] = field(default_factory=dict)  #: addresses by node, which replace name lookups
    deadline_s: float = 20.0  #: time that a node waits for nodes that have not started

    @classmethod
    def from_json(cls, text: str, token: str) -> ProbeRequest:
        """Return the request of a JSON document; the token is passed separately."""
        raw = json.loads(text)
        return cls(**{**raw, "nodes": tuple(raw["nodes"]), "token": token})


def probe_command(request: ProbeRequest, python: str = sys.executable) -> list[str]:
    """Return the command that each node executes once with `probe_env`. Its exit code is 0 unless the probe fails."""
    asked = {name: value for name, value in asdict(request).items() if name != "token"}
    return [python, "-P", "-m", "hpcdist.slurm.preflight.probe", json.dumps(asked, separators=(",", ":"))]


def probe_env(request: ProbeRequest) -> dict[str, str]:
    """Return the probe's variables: other users can read a command line, but not an environment."""
    return {_TOKEN: request.token}


@contextmanager
def witness_in(folder: Path) -> Iterator[tuple[Path, str]]:
    """Create a temporary folder with the file that all nodes must see; yields its path and the token in it."""
    witness, token = folder / "witness", secrets.token_hex(16)
    folder.mkdir(mode=0o700, exist_ok=True)
    witness.write_text(token)
    try:
        yield witness, token
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def answer(request: ProbeRequest, env: Mapping[str, str]) -> dict[str, Any]:
    """Return all facts of this node.

    Calls that may hang run in threads. The write test comes last, because it would slow down the network test.
    """
    node = node_name(env)
    if node not in request.nodes:
        raise HpcdistError(f"this is {node}, which is none of {', '.join(request.nodes)}")
    began = time.monotonic()
    first = request.nodes[0]
    names = () if request.addresses else {node, first}
    lookups = machine.Lookups(names, reverse=names)
    machine_facts = start(partial(read_machine, env))
    witness = start(lambda: storage.sees(Path(request.witness), request.token, WITNESS_S))
    found: dict[str, Any] = {"node": node, "host": socket.gethostname()}
    found["network"] = test_network(request, node)
    found["checkpoints"] = test_checkpoint_folder(request, node)
    for key, folder in (("shm", "/dev/shm"), ("tmp", env.get("TMPDIR") or "/tmp")):  # noqa: S108
        found[key] = storage.describe(Path(folder), FOLDER_S)
    found["witness"] = done_within(FOLDER_S, witness, False)
    facts: dict[str, Any] = done_within(machine.DRIVER_S, machine_facts, {})
    found |= facts
    found["lookups"] = lookups.result(LOOKUP_S)
    return found | {"seconds": round(time.monotonic() - began, 2)}


def read_machine(env: Mapping[str, str]) -> dict[str, Any]:
    """Return versions, GPUs, cores and interfaces."""
    found = machine.gpus()
    return {
        "versions": machine.versions(),
        "gpus": [asdict(gpu) for gpu in found],
        "visible_gpus": machine.visible_gpus(len(found), env),
        "gpu_device_files": machine.gpu_device_files(),
        "cores": machine.num_cores(),
        "interfaces": machine.interfaces(),
        "infiniband": machine.infiniband(),
        "locked_memory": machine.locked_memory(),
        "variables": machine.network_variables(env),
    }


def test_checkpoint_folder(request: ProbeRequest, node: str) -> dict[str, Any]:
    """Return the facts of the checkpoints' file system (storage.describe), with `bytes_s` or `write_error`."""
    folder = Path(request.checkpoint_folder)
    found = storage.describe(folder, FOLDER_S)
    every = -(-len(request.nodes) // WRITERS)
    if "error" in found or request.nodes.index(node) % every:
        return found
    num_bytes, limit_s = WRITE[request.mode]
    try:
        found["bytes_s"] = round(within(limit_s + FOLDER_S, lambda: storage.write_speed(folder, num_bytes, limit_s)))
    except TimeoutError:
        found["write_error"] = f"{num_bytes >> 20} MB were not on disk after {limit_s + FOLDER_S:g} s"
    except OSError as error:
        found["write_error"] = error.strerror or str(error)
    return found


def test_network(request: ProbeRequest, node: str) -> dict[str, Any]:
    """Return `peers` (Peer.as_answer), the bytes sent to each, this node's addresses, and problems of its port."""

    async def resolve(name: str) -> str:
        if name in request.addresses:
            return request.addresses[name]
        return await asyncio.wrap_future(start(lambda: socket.gethostbyname(name)))

    mesh = Mesh(
        request.nodes,
        node,
        port=request.port,
        token=request.token,
        mode=request.mode,
        resolve=resolve,
        bind=request.addresses.get(node),
        deadline_s=request.deadline_s,
    )
    asyncio.run(mesh.run())
    found: dict[str, Any] = {
        "addresses": sorted(mesh.addresses),
        "exchange_bytes": mesh.exchange_bytes,
        "peers": {name: peer.as_answer() for name, peer in mesh.peers.items()},
    }
    if mesh.num_foreign:
        found["strangers"] = mesh.num_foreign
    if mesh.port_problem:
        found |= {"port_problem": mesh.port_problem, "listener": machine.listener(request.port)}
    return found


def main(arguments: Sequence[str]) -> int:
    """Print this node's answer and return the exit code."""
    request = ProbeRequest.from_json(arguments[0], os.environ[_TOKEN])
    try:
        print_answer(answer(request, os.environ))
    except HpcdistError as error:
        print(f"hpcdist: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
