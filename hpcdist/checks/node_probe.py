"""The probe of a node, which the preflight and `hpcdist doctor RUN` start once on each node of a job.

    python -P -m hpcdist.checks.node_probe REQUEST

It prints the facts of its node. If the request asks for it, all probes then join a group, as ranks do, and each prints
its facts again with what it has seen there (`group`). The first answer counts where the second one does not come.
"""

import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from hpcdist.checks.node_facts import read_facts
from hpcdist.slurm.on_nodes import node_name, print_answer


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """The questions to each node."""

    first_node: str  #: the node of rank 0: every node looks up its name
    run_folder: str  #: the folder that every node must see
    checkpoint_folder: str  #: it may not exist yet
    witness: str  #: a file in the run folder
    token: str  #: the content of that file
    attempt: int | None = None  #: the attempt of the ranks that follow; None for the facts alone
    join_s: float = 0.0  #: time for all nodes to join the group

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the request that `probe_command` has written."""
        return cls(**json.loads(text))


def probe_command(request: ProbeRequest, python: str = sys.executable) -> list[str]:
    """Return the command that each node executes once."""
    text = json.dumps(asdict(request), separators=(",", ":"))
    return [python, "-P", "-m", "hpcdist.checks.node_probe", text]


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


def main() -> None:
    """Print the facts of this node, and again with those of the group of all nodes if the request asks for it."""
    request = ProbeRequest.from_json(sys.argv[1])
    node = node_name(os.environ)
    facts: dict[str, Any] = {"node": node}
    facts |= read_facts(
        (node, request.first_node),
        Path(request.checkpoint_folder),
        Path(request.witness),
        request.token,
        os.environ,
    )
    print_answer(facts)
    # A node joins with a key from the run folder.
    if request.attempt is not None and facts["witness"]:
        print_answer({**facts, "group": _join(request)})
    sys.stdout.flush()
    # Threads of the group, and calls that hang, would keep the process from ending.
    os._exit(0)


def _join(request: ProbeRequest) -> dict[str, Any]:
    try:
        from hpcdist.checks.node_group import join
    except ImportError as error:
        return {"not_imported": str(error)}
    return join(Path(request.run_folder), request.attempt or 0, request.join_s)


if __name__ == "__main__":
    main()
