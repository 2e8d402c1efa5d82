"""The preflight probe, which runs on every node before the ranks: `python -P -m hpcdist.preflight.probe REQUEST`.

It examines its machine, its file systems and its connections to the other nodes, and prints the facts. node_checks.py
compares the facts of all nodes. The probe uses the standard library alone, because it must start quickly and also
work on a node where installed packages such as torch are broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hpcdist.errors import HpcdistError
from hpcdist.machine import facts as machine
from hpcdist.machine import storage
from hpcdist.machine.time_limit import done_within, start, within
from hpcdist.preflight.mesh import Mesh

#: srun cuts what a task prints after 1,024 bytes, and puts its label, or other tasks' output, in between.
_PIECE = 800
#: How long a file of another machine may take to show on a network file system.
WITNESS_S = 3.0
#: A file system that says nothing for this long is dead.
FOLDER_S = 5.0
#: A resolver that takes longer is broken: torch asks it several times before ranks have met.
LOOKUP_S = 5.0
#: Bytes to write for a speed, and for how long at most.
WRITE = {"quick": (4 * 2**20, 1.5), "full": (128 * 2**20, 5.0)}
#: Where there are more nodes, only so many of them write.
WRITERS = 64
#: Files beside the witness by which nodes tell that they have started.
_MARK = "started-"
_LINE = re.compile(r"hpcdist-preflight (\S+) ([0-9]{1,6})/([0-9]{1,6}) (.*)")
_TOKEN = "HPCDIST_PREFLIGHT_TOKEN"  # noqa: S105  # a name


@dataclass(frozen=True, kw_only=True)
class Request:
    """What every node is asked.

    Attributes:
        mode: `quick`, or `full`, which writes and sends more.
        nodes: all nodes by their Slurm names, in the order of the run.
        port: where the probes meet; it should be the one that rank 0 will listen on.
        token: shows a probe that its peer belongs to the same job. A secret: it is not on the command line.
        run_folder: what every node must see.
        checkpoint_folder: where checkpoints go; it may not exist yet.
        witness: a file in a folder of this preflight's own inside the run folder, which holds the token. Nodes leave
            empty files beside it by which others learn that they have started; who made that folder removes it.
        checkpoint_bytes: size of the newest checkpoint, None where there is none yet.
        gpus_per_node: GPUs that ranks need on each node.
        tasks_per_node: ranks on each node.
        num_workers: processes that load data, for each rank.
        backend: `nccl`, `gloo` or `mpi`, as the ranks will use it.
        addresses: addresses by node, for nodes that shall not be looked up by their names.
        deadline_s: how long a node waits for others that have not even started.
    """

    mode: Literal["quick", "full"] = "quick"
    nodes: tuple[str, ...]
    port: int
    token: str
    run_folder: str
    checkpoint_folder: str
    witness: str
    checkpoint_bytes: int | None = None
    gpus_per_node: int = 0
    tasks_per_node: int = 1
    num_workers: int = 0
    backend: str = "gloo"
    addresses: Mapping[str, str] = field(default_factory=dict)
    deadline_s: float = 20.0

    @classmethod
    def from_json(cls, text: str, token: str) -> Request:
        raw = json.loads(text)
        return cls(**{**raw, "nodes": tuple(raw["nodes"]), "token": token})


def probe_command(request: Request, python: str = sys.executable) -> list[str]:
    """What each node executes, once, with `probe_env`: `srun --ntasks-per-node=1` in front of it.

    Exit code 0 unless it broke.
    """
    asked = {name: value for name, value in asdict(request).items() if name != "token"}
    return [python, "-P", "-m", "hpcdist.preflight.probe", json.dumps(asked, separators=(",", ":"))]


def probe_env(request: Request) -> dict[str, str]:
    """Variables that the probe needs: other users can read a process's command line, but not its environment."""
    return {_TOKEN: request.token}


def read_answers(stdout: str) -> dict[str, dict[str, Any]]:
    """Answers by node name, from what all probes have printed, also under `srun --label`. Torn ones are left out."""
    pieces: dict[str, dict[int, str]] = {}
    totals: dict[str, int] = {}
    for line in stdout.splitlines():
        if (found := _LINE.search(line)) is not None:
            node, number, total, text = found.groups()
            pieces.setdefault(node, {})[int(number)] = text
            totals[node] = int(total)
    answers: dict[str, dict[str, Any]] = {}
    for node, own in pieces.items():
        if own.keys() != set(range(totals[node])):
            continue
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(found := json.loads("".join(own[number] for number in range(totals[node]))), dict):
                answers[node] = found
    return answers


def answer_lines(node: str, answer: Mapping[str, Any]) -> list[str]:
    """An answer as lines short enough for srun."""
    text = json.dumps(answer, separators=(",", ":"))
    parts = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    return [f"hpcdist-preflight {node} {number}/{len(parts)} {part}" for number, part in enumerate(parts)]


def node_name(env: Mapping[str, str]) -> str:
    """This node as Slurm calls it, or its host name outside of Slurm."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def answer(request: Request, env: Mapping[str, str]) -> dict[str, Any]:
    """All that this node has to say; what each part means stands with the function that finds it.

    Whatever may never come back is looked at in threads meanwhile. Writing comes last: it would slow the network down.
    """
    node = node_name(env)
    if node not in request.nodes:
        raise HpcdistError(f"this is {node}, which is none of {', '.join(request.nodes)}")
    began = time.monotonic()
    first = request.nodes[0]
    names = () if request.addresses else {node, first}
    lookups = machine.Lookups(names, reverse=names)
    machine_facts = start(partial(look_at_machine, env))
    witness = start(lambda: storage.sees(Path(request.witness), request.token, WITNESS_S))
    found: dict[str, Any] = {"node": node, "host": socket.gethostname()}
    found["network"] = look_at_network(request, node)
    found["checkpoints"] = look_at_checkpoints(request, node)
    for key, folder in (("shm", "/dev/shm"), ("tmp", env.get("TMPDIR") or "/tmp")):  # noqa: S108
        found[key] = storage.look_at(Path(folder), FOLDER_S)
    found["witness"] = done_within(FOLDER_S, witness, False)
    facts: dict[str, Any] = done_within(machine.NVIDIA_SMI_S, machine_facts, {})
    found |= facts
    found["lookups"] = lookups.result(LOOKUP_S)
    return found | {"seconds": round(time.monotonic() - began, 2)}


def look_at_machine(env: Mapping[str, str]) -> dict[str, Any]:
    """Versions, GPUs, cores, interfaces."""
    gpus = machine.gpus()
    return {
        "versions": machine.versions(),
        "gpus": [asdict(gpu) for gpu in gpus],
        "visible_gpus": machine.visible_gpus(len(gpus), env),
        "gpu_device_files": machine.gpu_device_files(),
        "cores": machine.num_cores(),
        "interfaces": machine.interfaces(),
        "infiniband": machine.infiniband(),
        "locked_memory": machine.locked_memory(),
        "variables": machine.network_variables(env),
    }


def look_at_checkpoints(request: Request, node: str) -> dict[str, Any]:
    """The file system that checkpoints go to, with `bytes_s` or a `write_error`; see storage.look_at."""
    folder = Path(request.checkpoint_folder)
    found = storage.look_at(folder, FOLDER_S)
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


def look_at_network(request: Request, node: str) -> dict[str, Any]:
    """The way to the other nodes: `peers` (mesh.Peer.as_answer), this node's `addresses` on it, its `port_problem`.

    `strangers` counts connections that were refused.
    """
    folder = Path(request.witness).parent

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
        mark=(folder / f"{_MARK}{node}").touch,
        marks=lambda: [name.removeprefix(_MARK) for name in os.listdir(folder) if name.startswith(_MARK)],
        deadline_s=request.deadline_s,
    )
    asyncio.run(mesh.run())
    found: dict[str, Any] = {
        "addresses": sorted(mesh.addresses),
        "peers": {name: peer.as_answer() for name, peer in mesh.peers.items()},
    }
    if mesh.num_foreign:
        found["strangers"] = mesh.num_foreign
    if mesh.port_problem:
        found |= {"port_problem": mesh.port_problem, "listener": machine.listener(request.port)}
    return found


def main(arguments: Sequence[str]) -> int:
    """Print this node's answer; returns the exit code."""
    request = Request.from_json(arguments[0], os.environ[_TOKEN])
    try:
        lines = answer_lines(node_name(os.environ), answer(request, os.environ))
    except HpcdistError as error:
        print(f"hpcdist: {error}", file=sys.stderr)
        return error.exit_code
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
