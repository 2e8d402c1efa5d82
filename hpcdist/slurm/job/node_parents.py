"""The step of the processes that fork ranks, one on each node of a job; see `rank/parent.py`."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hpcdist.config.schema import Config
from hpcdist.containers.spec import ContainerSpec
from hpcdist.host import retry
from hpcdist.rank.processes import CANNOT_FORK
from hpcdist.run.folder import RunDir
from hpcdist.slurm.components import components
from hpcdist.slurm.current_job import signal_named_steps
from hpcdist.slurm.job.rank_step import ended_tasks
from hpcdist.slurm.job.srun import PARENTS_STEP, parents_command
from hpcdist.supervisor.launcher import Guard
from hpcdist.supervisor.plan import forked_task_command, node_parent_command, rank_command

log = logging.getLogger(__name__)
#: Time for a new parent to listen: until Slurm has started its step, and Python has been loaded.
CONNECT_S = 20.0
#: Time for the step to end after srun was asked to end it.
_END_S = 5.0
#: Options of srun that concern tasks of ranks only, and hold for forked ranks as well.
_PASSED_ON = {"cpu-bind", "distribution", "hint", "label", "mpi", "quiet", "unbuffered", "wait"}
#: Variables of the job by which srun would bind tasks or limit the processors of the step.
_OF_TASKS = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_CPU_BIND", "SLURM_HINT")


#: Options of sbatch by which each task gets GPUs or memory of its own, which the parent's step cannot give to a rank.
_OF_EACH_TASK = ("gpu-bind", "gpus-per-task", "mem-bind", "ntasks-per-gpu", "tres-bind", "tres-per-task")


def obstacle_to_fork(config: Config, box: ContainerSpec | None, env: Mapping[str, str]) -> str:
    """Return why `cluster.fork` has no effect in a job; "" if its ranks can be forked.

    Args:
        env: environment of the job; before its submission, without variables of Slurm.
    """
    if config.trainer.script:
        return "scripts import torch themselves (trainer.script)"
    if box is not None:
        return "the ranks run in containers"
    if len(components(config)) > 1:
        return "roles have nodes of their own (cluster.roles)"
    if others := sorted(config.cluster.srun.keys() - _PASSED_ON):
        return f"a forked rank cannot have the srun option --{others[0]} (cluster.srun)"
    chosen = {name: str(value) for name, value in config.cluster.sbatch.items()} | {
        name: env[variable] for name in _OF_EACH_TASK if (variable := _variable(name)) in env
    }
    for name in _OF_EACH_TASK:
        # Slurm 23.11 also has --cpus-per-task in SLURM_TRES_PER_TASK.
        if name in chosen and "none" not in chosen[name] and (name != "tres-per-task" or "gres" in chosen[name]):
            return f"--{name}={chosen[name]} gives each rank GPUs or memory of its own, which a forked rank cannot have"
    return ""


def _variable(option: str) -> str:
    """Return the variable by which sbatch passes an option on to srun."""
    return f"SLURM_{option.upper().replace('-', '_')}"


def planned_commands(run: RunDir, config: Config, python: str) -> tuple[list[str], list[str]]:
    """Return the command of the parents' step and that of a task, as far as they are known before the job."""
    output = run.path / "attempts" / "rank-parent-%N.log"
    parent = node_parent_command(run.path, config.launch.init_timeout_s, ["NAME"], python)
    return (
        parents_command(config.cluster, None, parent, output=output),
        forked_task_command(run.path, "NAME", CONNECT_S, _answer_limit_s(config), python),
    )


def _answer_limit_s(config: Config) -> float:
    """Return how long a task waits for its rank, in seconds."""
    return config.launch.init_timeout_s / 2  # the other ranks wait init_timeout_s for this one


class ParentSteps:
    """Keeps one step of parents for the nodes of the attempts, if `cluster.fork` is set and the ranks can be forked.

    Args:
        env: environment of steps.
        python: interpreter of the ranks.
        box: container of the ranks, if any.
    """

    def __init__(
        self,
        run: RunDir,
        config: Config,
        guard: Guard,
        *,
        env: Mapping[str, str],
        python: str,
        box: ContainerSpec | None = None,
    ) -> None:
        self._run = run
        self._config = config
        self._guard = guard
        self._env = env
        self._python = python
        self._current: NodeParents | None = None
        #: Names of steps on other sets of nodes.
        self._abandoned: list[str] = []
        obstacle = obstacle_to_fork(config, box, env)
        self._is_usable = config.cluster.fork and not obstacle
        if config.cluster.fork and obstacle:
            log.warning("cluster.fork has no effect: %s", obstacle)

    def task_command(self, nodes: Sequence[str]) -> list[str]:
        """Return the command of each task of an attempt on some nodes: the rank itself if no parents can fork it.

        Other nodes than before, and the end of a parent that could fork, lead to a new step.
        """
        if self._current is not None:
            self._replace(self._current, nodes)
        if self._current is None and self._is_usable:
            try:
                self._current = NodeParents(
                    self._run,
                    self._config,
                    nodes,
                    self._guard,
                    env=self._env,
                    python=self._python,
                    left=self._abandoned,
                )
            except OSError as error:  # ranks can do without it
                log.warning("each rank imports torch itself, since their parent process cannot be started: %s", error)
                self._is_usable = False
        if self._current is None:
            return rank_command(self._run.path, self._python)
        return self._current.task_command()

    def _replace(self, current: NodeParents, nodes: Sequence[str]) -> None:
        """End a step that cannot fork the ranks of the next attempt."""
        failures = current.failures()
        # The kernel ends a parent by SIGALRM that is still importing after its time limit.
        ended = sorted(node for node, code in failures.items() if code not in (CANNOT_FORK, -signal.SIGALRM))
        if current.nodes != tuple(nodes):
            # Slurm cannot end the step if a node is lost: the parents that follow end those before them.
            current.abandon()
            self._abandoned.append(current.name)
            self._current = None
        elif ended:
            log.warning(
                "the parent process of the ranks on %s has ended and is started again (see %s)",
                ", ".join(ended),
                current.messages,
            )
            self._close_current()
        elif failures.keys() >= set(nodes):
            log.warning(
                "each rank imports torch itself, since their parent processes have ended (see %s)", current.messages
            )
            self._close_current()
            self._is_usable = False

    def close(self) -> None:
        """End all steps, and with them their ranks."""
        self._close_current()
        if self._abandoned:
            signal_named_steps(PARENTS_STEP, "KILL")

    def _close_current(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None


class NodeParents:
    """The parent processes of the ranks on a fixed set of nodes. They outlive failed attempts.

    Args:
        env: environment of steps.
        python: interpreter of the ranks.
        left: names of abandoned steps, whose parents are ended.
    """

    def __init__(
        self,
        run: RunDir,
        config: Config,
        nodes: Sequence[str],
        guard: Guard,
        *,
        env: Mapping[str, str],
        python: str,
        left: Sequence[str] = (),
    ) -> None:
        self.nodes = tuple(nodes)
        self._guard = guard
        self._run = run
        self._python = python
        #: Tasks never find the parents of an earlier supervisor.
        self.name = f"{env['SLURM_JOB_ID']}-{secrets.token_hex(4)}"
        self._limit_s = _answer_limit_s(config)
        self._is_new = True
        #: srun's messages.
        self.messages = run.path / "attempts" / "rank-parent.log"
        self._messages_begin = self.messages.stat().st_size if self.messages.exists() else 0
        command = parents_command(
            config.cluster,
            nodes,
            node_parent_command(run.path, config.launch.init_timeout_s, [self.name, *left], python),
            output=self.messages.with_name("rank-parent-%N.log"),
        )
        own = {name: value for name, value in env.items() if not name.startswith(_OF_TASKS)}
        self._process = guard.start(command, env=own, cwd=run.path, output=self.messages)

    def task_command(self) -> list[str]:
        """Return the command of each task of the next attempt."""
        connect_s, self._is_new = CONNECT_S if self._is_new else 0.0, False
        return forked_task_command(self._run.path, self.name, connect_s, self._limit_s, self._python)

    def failures(self) -> dict[str, int]:
        """Return the exit codes of parents that have ended, by node; negative for a signal."""
        found: dict[str, int] = {}
        # Without the messages, tasks find out that no parent listens.
        with suppress(OSError), open(self.messages, "rb") as file:
            file.seek(self._messages_begin)
            found = dict(ended_tasks(file.read().decode(errors="replace")).values())
        code = self._process.poll()
        if not found and code is not None:
            # Slurm has not started the step, or srun was killed.
            found = dict.fromkeys(self.nodes, code if code < 0 else CANNOT_FORK)
        return found

    def abandon(self) -> None:
        """End srun, but not the step."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._guard.forget(self._process.pid)

    def close(self) -> None:
        """End the step, and with it the ranks."""
        if self._process.poll() is None:
            self._process.terminate()  # srun then also ends its tasks
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                signal_named_steps(PARENTS_STEP, "KILL")
        elif self._process.returncode < 0:  # the step outlives a killed srun
            signal_named_steps(PARENTS_STEP, "KILL")
        self.abandon()
        for left in self.messages.parent.glob(f"{self.name}.*"):  # sockets
            retry.discard(left)
