"""Slurm steps of a job that check the image on every node and remove leftover containers."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcdist.containers.image_probe import (
    PROBE_TIMEOUT_S,
    check_image_on_nodes,
    image_digest,
    image_probe_command,
    image_probe_env,
    start_failure,
    start_interrupted,
    started_by_other_task,
)
from hpcdist.containers.rank_container import make_mount_points
from hpcdist.containers.runtimes import CONTAINERS_STEP, remove_command
from hpcdist.containers.spec import ContainerSpec
from hpcdist.files.atomic import write_json
from hpcdist.files.log_text import last_lines
from hpcdist.files.retry import retry
from hpcdist.machine.timed_command import run_within
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir
from hpcdist.slurm.nodelist import expand

log = logging.getLogger(__name__)

#: Number of lines at the end of a rank's log that are searched for messages of the container runtime.
MAX_LINES = 20_000
REMOVE_S = 30.0
#: Slurm starts no more steps in this job; it has killed the running ones, and their containers ended with them.
_JOB_IS_OVER = re.compile("job \\d+ has expired|Unable to confirm allocation|already complet")


class ContainerSteps:
    """The containers of a job from one start of its batch script to the next requeue.

    Args:
        env: the environment that ranks inherit.
        het: whether the job is heterogeneous: several components, each with its own nodes.
    """

    def __init__(self, spec: ContainerSpec, run: RunDir, env: Mapping[str, str], *, het: bool = False) -> None:
        self._spec = spec
        self._run = run
        self._env = dict(env)
        self._het = het
        self._checked = False
        #: The nodes of the job on which steps can run, if these are not all.
        self.present: Sequence[str] = ()
        #: Whether a signal to a step, also of an earlier supervisor, may have ended pyxis' work on its containers.
        self._interrupted = True

    def prepare(self) -> None:
        """Remove leftover containers and, the first time, check the image on every node.

        Raises:
            UserMistake: a retry cannot help: a node lacks the runtime or the image, or the image has another version.
        """
        self.remove_containers()
        self._interrupted = False
        if self._checked:
            return
        make_mount_points(self._spec)
        facts: dict[str, Any] = {}
        for group, nodes in self._nodes():
            # Some components of a heterogeneous job may have no GPUs; the driver's version is visible without them.
            probe = image_probe_command(replace(self._spec, gpus="" if self._het else self._spec.gpus))
            env = image_probe_env(self._spec, self._env)
            done = self._on_nodes(nodes, group, probe.argv, env, PROBE_TIMEOUT_S, "--label", *probe.srun_flags)
            facts = check_image_on_nodes(self._spec, nodes, done.stdout, done.stderr)
        self._checked = True
        write_json(
            self._run.container,
            {
                "runtime": self._spec.runtime,
                "image": self._spec.image,
                "image_digest": image_digest(self._spec, self._env),
                **{key: facts[key] for key in ("hpcdist", "python", "torch", "cuda") if key in facts},
            },
        )

    def remove_containers(self, *, failed: bool = False) -> None:
        """Remove the run's containers from every node; the run's lease guarantees that no other job uses them.

        pyxis removes its containers itself, unless a signal to the step ends the creation or the removal.

        Args:
            failed: whether the step has failed or was killed.
        """
        self._interrupted |= failed
        if not (self._spec.outlives_step or (self._interrupted and self._spec.runtime == "pyxis")):
            return
        command = remove_command(self._spec, self._env.get("SLURM_JOB_ID", ""))
        for group, nodes in self._nodes():
            done = self._on_nodes(nodes, group, command, self._env, REMOVE_S)
            if done.returncode != 0 and not _JOB_IS_OVER.search(done.stderr):
                log.warning("containers may remain on a node: %s", " ".join(done.stderr.split()))

    def remove_files(self, attempt: Attempt) -> None:
        """Remove what the wrappers of a killed step have left in the folder of an attempt."""
        with suppress(OSError):  # nothing reads these files any more
            for path in attempt.path.glob("rank-*"):
                if path.suffix in (".line", ".exit"):
                    path.unlink(missing_ok=True)

    def exit_code(self, attempt: Attempt, rank: int, host: str, code: int) -> int:
        """Return a rank's exit code as if it ran outside a container.

        If the runtime could not start the container, write the outcome file that the rank could not write.
        """
        path = attempt.log(rank)
        text = "\n".join(line for _, line in last_lines(path, MAX_LINES)) if path.exists() else ""
        failed = start_failure(self._spec.runtime, code, text)
        # Ranks ignore the signal that Slurm sends ahead of the time limit: their container was still being created.
        interrupted = code == -signal.SIGUSR2 or start_interrupted(self._spec.runtime, text)
        if interrupted:
            self._interrupted = True
            failed = f"{self._spec.runtime} was interrupted by SIGUSR2 while it created the container", True
        if failed is not None and not attempt.outcome(rank).exists():
            error, may_pass = failed
            write_json(
                attempt.outcome(rank),
                {
                    "outcome": "failed" if may_pass else "rejected",
                    "rank": rank,
                    "host": host,
                    "time": time.time(),
                    "step": None,
                    "error": error,
                    "peer_lost": started_by_other_task(error),
                    "interrupted": interrupted,
                    "traceback": [],
                },
            )
        return _with_signal(code)

    def reported_exits(self, attempt: Attempt, *, skip: Container[int] = ()) -> dict[int, int]:
        """Return the exit codes other than 0 that process 1 of the ranks' containers (`pid1.py`) has written, by rank.

        srun reports the end of a rank only after the runtime's client has ended, which may take many seconds.
        """
        if not self._spec.outlives_step:
            return {}
        found = {}
        for path in retry(lambda: sorted(attempt.path.glob("rank-*.exit")), attempt.path):
            rank = int(path.stem.removeprefix("rank-"))
            # The wrapper of the rank removes the file once the container is removed.
            if rank not in skip and (code := _read_code(path)):
                found[rank] = _with_signal(code)
        return found

    def _nodes(self) -> list[tuple[list[str], list[str]]]:
        """Return srun's flags and the nodes, in Slurm's order, of each component of the job."""
        if self.present:
            return [([f"--nodelist={','.join(self.present)}"], list(self.present))]
        if not self._het:
            return [([], expand(self._env["SLURM_JOB_NODELIST"]))]
        size = int(self._env["SLURM_HET_SIZE"])
        return [
            ([f"--het-group={index}"], expand(self._env[f"SLURM_JOB_NODELIST_HET_GROUP_{index}"]))
            for index in range(size)
        ]

    def _on_nodes(
        self,
        nodes: Sequence[str],
        group: Sequence[str],
        command: Sequence[str],
        env: Mapping[str, str],
        timeout_s: float,
        *flags: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a step with one task per node, which shares the nodes with running steps."""
        step = ["srun", *group, "--overlap", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
        options = ["--cpus-per-task=1", "--input=none", f"--job-name={CONTAINERS_STEP}", *flags]
        return run_within([*step, *options, *command], timeout_s, env=env)


def _read_code(path: Path) -> int:
    """Return the exit code in a file; 0 if the file does not exist any more."""
    try:
        return int(retry(path.read_text, path))
    except FileNotFoundError:
        return 0


def _with_signal(code: int) -> int:
    """Return an exit code of a shell, 128 + a signal, as the negative signal."""
    known = code > 128 and code - 128 in {int(number) for number in signal.Signals}
    return 128 - code if known else code
