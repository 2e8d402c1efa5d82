"""What a job does about containers beside its ranks: look whether nodes can start them, remove what is left."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpcdist.containers.request import prepare_image
from hpcdist.containers.runtimes import CONTAINERS_STEP, Box, remove_command
from hpcdist.containers.trial_start import LOOK_S, digest, judge_nodes, look_command, look_env, own_failure
from hpcdist.files.atomic import write_json
from hpcdist.files.log_text import last_lines
from hpcdist.machine.timed_command import run_within
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir
from hpcdist.slurm.nodelist import expand

log = logging.getLogger(__name__)

#: The end of a rank's log in which the messages of a container runtime are looked for.
MAX_LINES = 20_000
REMOVE_S = 30.0
#: Slurm starts no step any more; it has killed those that there were, and their containers have ended with them.
_JOB_IS_OVER = re.compile("job \\d+ has expired|Unable to confirm allocation|already complet")


class ContainerSteps:
    """The containers of one life of a job.

    Args:
        env: what ranks inherit.
        het: whether the job has several components, each with nodes of its own.
    """

    def __init__(self, box: Box, run: RunDir, env: Mapping[str, str], *, het: bool = False) -> None:
        self._box = box
        self._run = run
        self._env = dict(env)
        self._het = het
        self._looked = False

    def prepare(self) -> None:
        """Look at the image on every node, once in each life of a job, and remove what an earlier one has left.

        Raises UserMistake for what no retry cures: no such runtime or image on a node, an image of another version.
        """
        self.remove_left()
        if self._looked:
            return
        prepare_image(self._box)
        facts: dict[str, Any] = {}
        for group, nodes in self._nodes():
            # Not every component need have GPUs to ask for; a driver shows without, where there is one.
            look = look_command(replace(self._box, gpus=self._box.gpus and not self._het))
            env = look_env(self._box, self._env)
            done = self._on_nodes(nodes, group, look.words, env, LOOK_S, "--label", *look.srun)
            facts = judge_nodes(self._box, nodes, done.stdout, done.stderr)
        self._looked = True
        write_json(
            self._run.container,
            {
                "runtime": self._box.runtime,
                "image": self._box.image,
                "image_digest": digest(self._box, self._env),
                **{key: facts[key] for key in ("hpcdist", "python", "torch", "cuda") if key in facts},
            },
        )

    def remove_left(self) -> None:
        """Remove the run's containers from every node; its lease says that nobody else uses them."""
        if not self._box.outlives_step:
            return
        for group, nodes in self._nodes():
            done = self._on_nodes(nodes, group, remove_command(self._box), self._env, REMOVE_S)
            if done.returncode != 0 and not _JOB_IS_OVER.search(done.stderr):
                log.warning("containers may be left on a node: %s", " ".join(done.stderr.split()))

    def meaning(self, attempt: Attempt, rank: int, host: str, code: int) -> int:
        """A rank's exit code as if there were no container around it.

        What the runtime could not start has no rank that could say so: it is reported in the rank's place.
        """
        path = attempt.log(rank)
        text = "\n".join(line for _, line in last_lines(path, MAX_LINES)) if path.exists() else ""
        failed = own_failure(self._box.runtime, code, text)
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
                    "peer_lost": False,
                    "traceback": [],
                },
            )
        known = code > 128 and code - 128 in {int(number) for number in signal.Signals}
        return 128 - code if known else code

    def _nodes(self) -> list[tuple[list[str], list[str]]]:
        """srun's flags and the nodes, in Slurm's own order, of each component of the job."""
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
        """One task a node, beside whatever runs there; a node that does not answer counts as silent."""
        step = ["srun", *group, "--overlap", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
        options = ["--cpus-per-task=1", "--input=none", f"--job-name={CONTAINERS_STEP}", *flags]
        return run_within([*step, *options, *command], timeout_s, env=env)
