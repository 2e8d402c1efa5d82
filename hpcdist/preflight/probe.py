"""What every node of a run executes before its ranks start: `python -P -m hpcdist.preflight.probe REQUEST`.

It looks at its machine, its file systems and its way to the other nodes, and prints an answer. It judges nothing: what
is wrong shows in the answers of all nodes side by side (judge.py). The standard library alone, so that it starts at
once and also where torch is what is broken.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpcdist.errors import HpcdistError
from hpcdist.preflight.mesh import Mesh
from hpcdist.preflight.patience import start

#: srun cuts what a task prints after 1,024 bytes, and puts its label, or other tasks' output, in between.
_PIECE = 800
#: Files beside the witness by which nodes tell that they have started.
_MARK = "started-"
_LINE = re.compile(r"hpcdist-preflight (\S+) (\d+)/(\d+) (.*)")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What every node is asked.

    Attributes:
        mode: `quick`, or `full`, which writes and sends more.
        nodes: all nodes by their Slurm names, in the order of the run.
        port: where the probes meet; it should be the one that rank 0 will listen on.
        token: shows a probe that its peer belongs to the same job. No secret: other users can read command lines.
        run_folder: what every node must see.
        checkpoint_folder: where checkpoints go; it may not exist yet.
        witness: a file in a folder of this preflight's own inside the run folder, which holds the token. Nodes leave
            empty files beside it by which others learn that they have started; who made that folder removes it.
        checkpoint_bytes: size of the newest checkpoint, None where there is none yet.
        gpus_per_node: GPUs that ranks need on each node.
        tasks_per_node: ranks on each node.
        cpus_per_task: cores of each rank.
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
    cpus_per_task: int = 1
    num_workers: int = 0
    backend: str = "gloo"
    addresses: Mapping[str, str] = field(default_factory=dict)
    deadline_s: float = 30.0

    @classmethod
    def from_json(cls, text: str) -> Request:
        raw = json.loads(text)
        return cls(**{**raw, "nodes": tuple(raw["nodes"])})


def probe_command(request: Request, python: str = sys.executable) -> list[str]:
    """What each node executes, once: `srun --ntasks-per-node=1` in front of it. Exit code 0 unless it broke."""
    return [python, "-P", "-m", "hpcdist.preflight.probe", json.dumps(asdict(request), separators=(",", ":"))]


def read_answers(stdout: str) -> dict[str, dict[str, Any]]:
    """Answers by node name, from what all probes have printed, also under `srun --label`. Torn ones are left out."""
    pieces: dict[str, dict[int, str]] = {}
    totals: dict[str, int] = {}
    for line in stdout.splitlines():
        if (found := _LINE.search(line)) is not None:
            node, number, total, text = found.groups()
            pieces.setdefault(node, {})[int(number)] = text
            totals[node] = int(total)
    return {
        node: json.loads("".join(own[number] for number in range(totals[node])))
        for node, own in pieces.items()
        if len(own) == totals[node]
    }


def answer_lines(node: str, answer: Mapping[str, Any]) -> list[str]:
    """An answer as lines short enough for srun."""
    text = json.dumps(answer, separators=(",", ":"))
    parts = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    return [f"hpcdist-preflight {node} {number}/{len(parts)} {part}" for number, part in enumerate(parts)]


def node_name(env: Mapping[str, str]) -> str:
    """This node as Slurm calls it, or its host name outside of Slurm."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def answer(request: Request, env: Mapping[str, str]) -> dict[str, Any]:
    """All that this node has to say."""
    node = node_name(env)
    began = time.monotonic()
    found: dict[str, Any] = {"node": node, "host": socket.gethostname()}
    found["network"] = look_at_network(request, node)
    return found | {"seconds": round(time.monotonic() - began, 2)}


def look_at_network(request: Request, node: str) -> dict[str, Any]:
    """The way to the other nodes; an `error` where there is not even a way to listen."""
    folder = Path(request.witness).parent

    async def resolve(name: str) -> str:
        return request.addresses.get(name) or await asyncio.wrap_future(start(lambda: socket.gethostbyname(name)))

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
    return {
        "port_problem": mesh.port_problem,
        "addresses": sorted(mesh.addresses),
        "peers": {name: peer.as_answer() for name, peer in mesh.peers.items()},
    }


def main(arguments: Sequence[str]) -> int:
    """Print this node's answer."""
    if len(arguments) != 1:
        raise HpcdistError("a probe takes one argument, its request as JSON")
    request = Request.from_json(arguments[0])
    sys.stdout.write("".join(f"{line}\n" for line in answer_lines(node_name(os.environ), answer(request, os.environ))))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
