"""The step of the processes that fork ranks, one on each node of a job; see `rank/parent.py`."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hpcdist.config.schema import Config
from hpcdist.containers.spec import ContainerSpec
from hpcdist.host import retry
from hpcdist.rank.processes import CANNOT_FORK
from hpcdist.run.folder import RunDir
from hpcdist.slurm.client import signal_named_steps
from hpcdist.slurm.components import components
from hpcdist.slurm.job.srun import PARENTS_STEP, ended_tasks, parents_command
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
    # sbatch passes these options on to srun by variables.
    variables = {name: f"SLURM_{name.upper().replace('-', '_')}" for name in _OF_EACH_TASK}
    chosen = {name: str(value) for name, value in config.cluster.sbatch.items()}
    chosen |= {name: env[variable] for name, variable in variables.items() if variable in env}
    for name in _OF_EACH_TASK:
        # Slurm 23.11 also has --cpus-per-task in SLURM_TRES_PER_TASK.
        if name in chosen and "none" not in chosen[name] and (name != "tres-per-task" or "gres" in chosen[name]):
            return f"--{name}={chosen[name]} gives each rank GPUs or memory of its own, which a forked rank cannot have"
    return ""


def planned_commands(run: RunDir, config: Config, python: str) -> tuple[list[str], list[str]]:
    """Return the command of the parents' step and that of a task, as far as they are known before the job."""
    output = run.path / "attempts" / "rank-parent-%N.log"
    parent = node_parent_command(run.path, config.launch.init_timeout_s, ["NAME"], python)
    return (
        parents_command(config.cluster, None, parent, output=output),
        forked_task_command(run.path, "NAME", CONNECT_S, _answer_limit_s(config), python),
    )


def _answer_limit_s(config: Config) -> float:
    return config.launch.init_timeout_s / 2  # the other ranks wait init_timeout_s for this one


@dataclass
class _Step:
    """The parent processes on a fixed set of nodes, which outlive failed attempts."""

    nodes: tuple[str, ...]
    name: str  #: tasks never find the parents of an earlier supervisor
    process: subprocess.Popen[bytes]
    messages_begin: int
    is_new: bool = True


class ParentSteps:
    """Keeps one step of parents for the nodes of the attempts, if `cluster.fork` is set and the ranks can be forked."""

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
        #: srun's messages.
        self._messages = run.path / "attempts" / "rank-parent.log"
        self._step: _Step | None = None
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
        if self._step is not None:
            self._replace(self._step, nodes)
        if self._step is None and self._is_usable:
            try:
                self._step = self._start(nodes)
            except OSError as error:  # ranks can do without it
                log.warning("each rank imports torch itself, since their parent process cannot be started: %s", error)
                self._is_usable = False
        if self._step is None:
            return rank_command(self._run.path, self._python)
        connect_s, self._step.is_new = CONNECT_S if self._step.is_new else 0.0, False
        limit_s = _answer_limit_s(self._config)
        return forked_task_command(self._run.path, self._step.name, connect_s, limit_s, self._python)

    def _start(self, nodes: Sequence[str]) -> _Step:
        name = f"{self._env['SLURM_JOB_ID']}-{secrets.token_hex(4)}"
        begin = self._messages.stat().st_size if self._messages.exists() else 0
        # The new parents end those of abandoned steps.
        names = [name, *self._abandoned]
        command = parents_command(
            self._config.cluster,
            nodes,
            node_parent_command(self._run.path, self._config.launch.init_timeout_s, names, self._python),
            output=self._messages.with_name("rank-parent-%N.log"),
        )
        env = {name: value for name, value in self._env.items() if not name.startswith(_OF_TASKS)}
        process = self._guard.start(command, env=env, cwd=self._run.path, output=self._messages)
        return _Step(tuple(nodes), name, process, begin)

    def _replace(self, step: _Step, nodes: Sequence[str]) -> None:
        """End a step that cannot fork the ranks of the next attempt."""
        failures = self._failures(step)
        # The kernel ends a parent by SIGALRM that is still importing after its time limit.
        ended = sorted(node for node, code in failures.items() if code not in (CANNOT_FORK, -signal.SIGALRM))
        if step.nodes != tuple(nodes):
            # Slurm cannot end the step if a node is lost: the parents that follow end those before them.
            self._abandon(step)
            self._abandoned.append(step.name)
        elif ended:
            names = ", ".join(ended)
            why = "the parent process of the ranks on %s has ended and is started again (see %s)"
            log.warning(why, names, self._messages)
            self._end(step)
        elif failures.keys() >= set(nodes):
            why = "each rank imports torch itself, since their parent processes have ended (see %s)"
            log.warning(why, self._messages)
            self._end(step)
            self._is_usable = False

    def _failures(self, step: _Step) -> dict[str, int]:
        """Return the exit codes of parents that have ended, by node; negative for a signal."""
        found: dict[str, int] = {}
        # Without the messages, tasks find out that no parent listens.
        with suppress(OSError), open(self._messages, "rb") as file:
            file.seek(step.messages_begin)
            found = dict(ended_tasks(file.read().decode(errors="replace")).values())
        code = step.process.poll()
        if not found and code is not None:
            # Slurm has not started the step, or srun was killed.
            found = dict.fromkeys(step.nodes, code if code < 0 else CANNOT_FORK)
        return found

    def close(self) -> None:
        if self._step is not None:
            self._end(self._step)
        if self._abandoned:
            signal_named_steps(PARENTS_STEP, "KILL")

    def _end(self, step: _Step) -> None:
        if step.process.poll() is None:
            step.process.terminate()  # srun then also ends its tasks
            try:
                step.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                signal_named_steps(PARENTS_STEP, "KILL")
        elif step.process.returncode < 0:  # the step outlives a killed srun
            signal_named_steps(PARENTS_STEP, "KILL")
        self._abandon(step)
        for left in self._messages.parent.glob(f"{step.name}.*"):  # sockets
            retry.discard(left)

    def _abandon(self, step: _Step) -> None:
        """End srun, but not the step."""
        if step.process.poll() is None:
            os.killpg(step.process.pid, signal.SIGKILL)
            step.process.wait()
        self._guard.forget(step.process.pid)
        self._step = None
