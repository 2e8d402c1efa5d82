"""The containers of a job: the steps that check the image on each node and remove what pyxis has left, and the exit
codes of ranks in containers.
"""

import logging
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpcdist.config.slurm_notation import expand
from hpcdist.containers.probe import PROBE_TIMEOUT_S, check_image_on_nodes, image_digest, image_probe, start_failure
from hpcdist.containers.runtimes import CONTAINERS_STEP, outer_env, remove_command
from hpcdist.containers.spec import ContainerSpec
from hpcdist.host.json_files import write_json
from hpcdist.host.log_files import last_lines
from hpcdist.host.time_limits import run_within
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.slurm.on_nodes import task_words

log = logging.getLogger(__name__)

#: Number of lines at the end of a rank's log that are searched for messages of the container runtime.
MAX_LINES = 20_000
#: Time limit for the removal of a job's containers from its nodes.
REMOVAL_S = 30.0
#: Facts of the probe that are recorded in the run folder.
RECORDED = ("hpcdist", "python", "torch", "cuda", "driver")
#: Errors of srun in a job that is over. Slurm has killed its steps, and their containers ended with them.
_JOB_IS_OVER = re.compile(r"job \d+ has expired|Unable to confirm allocation|already complet")
#: Message of pyxis if a signal has ended `enroot create`.
_ENDED_BY_USR2 = re.compile(rf"pyxis: child \d+ terminated with signal {int(signal.SIGUSR2)}\b")
#: Message of pyxis in the other tasks of a node: it starts one container per node and step, and the log of the task
#: that started it has the reason.
_OTHER_TASK_FAILED = "pyxis: container was not started successfully by another task"
#: If a signal ends the command of a shell, the shell exits with this number plus the signal.
_SHELL_SIGNAL = 128


class NoContainers:
    """The ranks of a job without containers."""

    def env(self, env: Mapping[str, str]) -> Mapping[str, str]:
        """Return the environment of the step that runs the ranks."""
        return env

    def prepare(self, end_steps: Callable[[], object]) -> None:
        """End the remaining steps, remove leftover containers and, the first time, check the image on every node.

        Raises UserMistake if a retry cannot help: a node lacks the runtime, or the image of this version.
        """

    def clean_up(self, *, failed: bool) -> None:
        """Remove the files that the step of an attempt has left on the nodes."""

    def exit_code(self, attempt: Attempt, rank: int, host: str, code: int) -> int:
        """Return a rank's exit code as if it ran outside a container."""
        return code


class ContainerSteps(NoContainers):
    """The containers of a job from one start of its batch script to the next requeue.

    Args:
        present: returns the nodes of the job on which steps can run; none if these are all nodes of the job.
    """

    def __init__(
        self,
        spec: ContainerSpec,
        run: RunDir,
        env: Mapping[str, str],
        *,
        present: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._spec = spec
        self._run = run
        self._env = dict(env)
        self._present = present
        self._checked = False
        #: Whether a signal to a step, also of an earlier supervisor, may have ended pyxis' work on its containers.
        self._interrupted = True

    def env(self, env: Mapping[str, str]) -> Mapping[str, str]:
        return outer_env(self._spec, env)

    def prepare(self, end_steps: Callable[[], object]) -> None:
        # pyxis may still be removing containers, and ending its step kills that: the next line removes the rest.
        end_steps()
        self._remove_containers()
        self._interrupted = False
        if not self._checked:
            self._check_image()
            self._checked = True

    def _check_image(self) -> None:
        nodes, flags = self._nodes()
        probe, env = image_probe(self._spec, self._env)
        step = ["srun", *task_words(nodes, probe, CONTAINERS_STEP, {**flags, "label": True})]
        done = run_within(step, PROBE_TIMEOUT_S, env=env)
        facts = check_image_on_nodes(self._spec, nodes, done.stdout, done.stderr)
        record = {
            "runtime": self._spec.runtime,
            "image": self._spec.image,
            "image_digest": image_digest(self._spec),
        }
        for key in RECORDED:
            if key in facts:
                record[key] = facts[key]
        write_json(self._run.container, record)

    def clean_up(self, *, failed: bool) -> None:
        self._interrupted |= failed
        self._remove_containers()

    def _remove_containers(self) -> None:
        """Remove the job's containers from every node if pyxis may not have removed them.

        A signal to the step ends the creation or the removal of a container by pyxis. The containers of other runtimes
        leave nothing behind.
        """
        if self._spec.runtime != "pyxis" or not self._interrupted:
            return
        nodes, flags = self._nodes()
        command = remove_command(self._env.get("SLURM_JOB_ID", ""))
        done = run_within(["srun", *task_words(nodes, command, CONTAINERS_STEP, flags)], REMOVAL_S, env=self._env)
        if done.returncode != 0 and not _JOB_IS_OVER.search(done.stderr):
            log.warning("containers may remain on a node: %s", " ".join(done.stderr.split()))

    def exit_code(self, attempt: Attempt, rank: int, host: str, code: int) -> int:
        runtime = self._spec.runtime
        path = attempt.log(rank)
        text = ""
        if path.exists():
            text = "\n".join(line for _, line in last_lines(path, MAX_LINES))
        failure = start_failure(runtime, code, text)
        # A rank ignores the signal that Slurm sends ahead of the time limit, so the signal has ended the runtime.
        interrupted = code == -signal.SIGUSR2
        if runtime == "pyxis" and _ENDED_BY_USR2.search(text) is not None:
            interrupted = True
        if interrupted:
            self._interrupted = True
            failure = f"{runtime} was interrupted by SIGUSR2 while it created the container", True
        if failure is not None and not attempt.outcome(rank).exists():
            error, may_pass = failure
            write_json(
                attempt.outcome(rank),
                {
                    "outcome": "failed" if may_pass else "rejected",
                    "rank": rank,
                    "host": host,
                    "time": time.time(),
                    "step": None,
                    "error": error,
                    "peer_lost": error.endswith(_OTHER_TASK_FAILED),
                    "interrupted": interrupted,
                    "traceback": [],
                },
            )
        return _with_signal(code)

    def _nodes(self) -> tuple[list[str], Mapping[str, Any]]:
        """Return the nodes on which steps can run, in Slurm's order, and the flags of srun that choose them."""
        present = self._present()
        if present:
            return list(present), {"nodelist": ",".join(present)}
        return expand(self._env["SLURM_JOB_NODELIST"]), {}


def _with_signal(code: int) -> int:
    """Return the exit code of a shell, 128 + a signal, as the negative signal; other exit codes unchanged."""
    if code - _SHELL_SIGNAL in set(signal.Signals):
        return _SHELL_SIGNAL - code
    return code
