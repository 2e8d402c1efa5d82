"""Run an unmodified torchrun-style script as a rank."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpcdist.config.topology import Roles, Topology
from hpcdist.errors import TrainerError
from hpcdist.run.folder import RunDir

log = logging.getLogger(__name__)


def script_environment(topology: Topology, run: RunDir, roles: Roles) -> dict[str, str]:
    """Return the environment variables of torchrun, and those of hpcdist.

    Reference: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    role, index = roles.of_rank(topology.rank)
    return {
        "RANK": str(topology.rank),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_RANK": str(topology.local_rank),
        "LOCAL_WORLD_SIZE": str(topology.local_world_size),
        "GROUP_RANK": str(topology.node_rank),
        "GROUP_WORLD_SIZE": str(topology.num_nodes),
        "ROLE_NAME": role,
        "ROLE_RANK": str(index),
        "ROLE_WORLD_SIZE": str(roles.count(role)),
        "MASTER_ADDR": topology.master_addr,
        "MASTER_PORT": str(topology.master_port),
        "TORCHELASTIC_RUN_ID": topology.job_id,
        "TORCHELASTIC_RESTART_COUNT": str(max(topology.attempt - 1, 0)),
        "HPCDIST_RUN_DIR": str(run.path),
        "HPCDIST_CHECKPOINT_DIR": str(run.checkpoints),
        "HPCDIST_ATTEMPT": str(topology.attempt),
        "HPCDIST_ROLE": role,
        "HPCDIST_ROLE_INDEX": str(index),
        "HPCDIST_ROLES": json.dumps(dict(roles.counts)),
    }


def run_script(command: Sequence[str], run: RunDir, topology: Topology, roles: Roles) -> None:
    """Run `[script, argument, …]` or `[-m, module, argument, …]` as `__main__` in this process, from the code snapshot.

    The script handles signals itself; hpcdist installs no handlers.

    Raises TrainerError if the script does not exist, RuntimeError if it exits with a non-zero status, and any exception
    of the script.
    """
    is_module = command[0] == "-m"
    script, *arguments = command[is_module:]
    path = script if is_module else str(run.snapshot_of(Path(script)) or script)
    if not is_module and not Path(path).is_file():
        raise TrainerError(f"trainer.script: no such file: {script}")
    if path != script and topology.rank == 0:
        log.info("running the copy %s; links in it lead to files beside %s that are not copied", path, script)
    os.environ.update(script_environment(topology, run, roles))
    sys.argv = [path, *arguments]
    with exit_as_return(script):
        if is_module:  # the copy of the code is on sys.path
            if importlib.util.find_spec(script) is None:
                raise TrainerError(f"trainer.script: no module {script!r}")
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(path).parent))
            runpy.run_path(path, run_name="__main__")


@contextmanager
def exit_as_return(name: str) -> Iterator[None]:
    """Let `sys.exit` end the block. Raises RuntimeError after an exit with a non-zero status."""
    try:
        yield
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise RuntimeError(f"{name} ended with exit status {ended.code}") from ended
