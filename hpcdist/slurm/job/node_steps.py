"""Steps of a job beside its ranks: the parents that fork ranks, the watchdog, and the search for ranks on each node.

python -m hpcdist.slurm.job.node_steps watch JOB
python -m hpcdist.slurm.job.node_steps list|kill RUN
"""

import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from hpcdist.config.schema import Config
from hpcdist.config.topology import expand
from hpcdist.containers.spec import ContainerSpec
from hpcdist.errors import HpcdistError
from hpcdist.host import retry
from hpcdist.rank.processes import CANNOT_FORK
from hpcdist.run.folder import RunDir
from hpcdist.slurm import client
from hpcdist.slurm.client import signal_named_steps
from hpcdist.slurm.job.srun import NODE_STEPS, PARENTS_STEP, ended_tasks, parents_command, watchdog_command
from hpcdist.slurm.on_nodes import JobNodes, announced, ask, nodes_command, print_answer
from hpcdist.slurm.output import parse_text
from hpcdist.slurm.placement import role_nodes
from hpcdist.supervisor.children import Guard
from hpcdist.supervisor.hang import family, find_ranks
from hpcdist.supervisor.plan import forked_task_command, parent_command, rank_command

log = logging.getLogger(__name__)

# The processes that fork ranks, one on each node of a job; see `rank/parent.py`.

#: Time for a new parent to listen: until Slurm has started its step, and Python has been loaded.
CONNECT_S = 20.0
#: Options of srun that concern tasks of ranks only, and hold for forked ranks as well.
_PASSED_ON = {"cpu-bind", "distribution", "hint", "label", "mpi", "quiet", "unbuffered", "wait"}
#: Variables of the job by which srun would bind tasks or limit the processors of the step.
_OF_TASKS = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_CPU_BIND", "SLURM_HINT")
#: Options of sbatch by which each task gets GPUs or memory of its own, which the parent's step cannot give to a rank.
_OF_EACH_TASK = ("gpu-bind", "gpus-per-task", "mem-bind", "ntasks-per-gpu", "tres-bind", "tres-per-task")


def obstacle_to_fork(config: Config, box: ContainerSpec | None, env: Mapping[str, str]) -> str:
    """Return why `cluster.fork` has no effect in a job with an environment; "" if its ranks can be forked."""
    if config.trainer.script:
        return "scripts import torch themselves (trainer.script)"
    if box is not None:
        return "the ranks run in containers"
    if len(role_nodes(config)) > 1:
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
    parent = parent_command(run.path, f"{config.launch.init_timeout_s:g}", "NAME", python=python)
    return (
        parents_command(config.cluster, None, parent, output=output),
        forked_task_command(run.path, "NAME", CONNECT_S, _answer_limit_s(config), python),
    )


def _answer_limit_s(config: Config) -> float:
    return config.launch.init_timeout_s / 2  # the other ranks wait init_timeout_s for this one


@dataclass
class _Step:
    nodes: tuple[str, ...]
    name: str  #: tasks never find the parents of an earlier supervisor
    process: subprocess.Popen[bytes]
    messages_begin: int
    is_new: bool = True


@dataclass(eq=False)
class ParentSteps:
    """Keeps one step of parents for the nodes of the attempts, if `cluster.fork` is set and the ranks can be forked."""

    run: RunDir
    config: Config
    guard: Guard
    _: KW_ONLY
    env: Mapping[str, str]
    python: str
    box: ContainerSpec | None = None

    def __post_init__(self) -> None:
        #: srun's messages.
        self._messages = self.run.path / "attempts" / "rank-parent.log"
        self._step: _Step | None = None
        #: Names of steps on other sets of nodes.
        self._abandoned: list[str] = []
        obstacle = obstacle_to_fork(self.config, self.box, self.env)
        self._is_usable = self.config.cluster.fork and not obstacle
        if self.config.cluster.fork and obstacle:
            log.warning("cluster.fork has no effect: %s", obstacle)

    def task_command(self, nodes: Sequence[str]) -> list[str]:
        """Return the command of each task of an attempt on some nodes: the rank itself if no parents can fork it."""
        if self._step is not None:
            self._replace(self._step, nodes)
        if self._step is None and self._is_usable:
            try:
                self._step = self._start(nodes)
            except OSError as error:  # ranks can do without it
                log.warning("each rank imports torch itself, since their parent process cannot be started: %s", error)
                self._is_usable = False
        if self._step is None:
            return rank_command(self.run.path, self.python)
        connect_s, self._step.is_new = CONNECT_S if self._step.is_new else 0.0, False
        limit_s = _answer_limit_s(self.config)
        return forked_task_command(self.run.path, self._step.name, connect_s, limit_s, self.python)

    def _start(self, nodes: Sequence[str]) -> _Step:
        name = f"{self.env['SLURM_JOB_ID']}-{secrets.token_hex(4)}"
        begin = self._messages.stat().st_size if self._messages.exists() else 0
        limit_s = f"{self.config.launch.init_timeout_s:g}"
        # The new parents end those of abandoned steps.
        parent = parent_command(self.run.path, limit_s, name, *self._abandoned, python=self.python)
        output = self._messages.with_name("rank-parent-%N.log")
        command = parents_command(self.config.cluster, nodes, parent, output=output)
        env = {name: value for name, value in self.env.items() if not name.startswith(_OF_TASKS)}
        process = self.guard.start(command, env=env, cwd=self.run.path, output=self._messages)
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
                step.process.wait(5.0)
            except subprocess.TimeoutExpired:
                signal_named_steps(PARENTS_STEP, "KILL")
        elif step.process.returncode < 0:  # the step outlives a killed srun
            signal_named_steps(PARENTS_STEP, "KILL")
        self._abandon(step)
        for left in self._messages.parent.glob(f"{step.name}.*"):  # sockets
            retry.discard(left)

    def _abandon(self, step: _Step) -> None:
        if step.process.poll() is None:
            os.killpg(step.process.pid, signal.SIGKILL)
            step.process.wait()
        self.guard.forget(step.process.pid)
        self._step = None


# The watchdog, on a node other than the batch host: from a job with `--no-kill` Slurm removes a batch host that fails,
# and leaves the job running without its batch step (seen with 22.05). The supervisor cannot request the requeue,
# because it ran on the failed node.

#: Low load for a controller, and short compared with the minutes until it declares a node down.
WATCH_EVERY_S = 20.0


def has_lost_batch_host(record: Mapping[str, str]) -> bool:
    if record.get("JobState") != "RUNNING":
        return False
    host, nodes = parse_text(record.get("BatchHost")), parse_text(record.get("NodeList"))
    return bool(host and nodes) and host not in expand(nodes)


def watch(job_id: str) -> None:
    while True:
        time.sleep(WATCH_EVERY_S)
        try:
            if has_lost_batch_host(client.job_record(job_id)):
                print(f"job {job_id} has lost its batch host: requeueing it", flush=True)
                client.requeue_job(job_id)
        except HpcdistError as error:
            print(error, flush=True)  # tried again at the next poll


@dataclass(eq=False)
class WatchdogStep:
    job_id: str
    guard: Guard
    _: KW_ONLY
    env: Mapping[str, str]
    cwd: Path
    output: Path

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._node = ""

    def move(self, batch_host: str, used: Sequence[str], present: Sequence[str]) -> None:
        """Let the watchdog run on one of the `present` nodes other than the batch host; none if nodes do not change."""
        others = [node for node in present if node != batch_host]
        # Nodes with ranks come first: with the loss of one a new attempt begins, and with it a new watchdog.
        others = [node for node in others if node in used] or others
        if self._process is not None and (self._process.poll() is not None or self._node not in others):
            self.close()
        if self._process is None and others:
            self._node = others[-1]
            command = watchdog_command(self.job_id, self._node)
            self._process = self.guard.start(command, env=self.env, cwd=self.cwd, output=self.output)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.guard.forget(self._process.pid)
            self._process = None


# The search for ranks on each node, to list or kill them without Slurm, which cannot signal ranks after the end of
# their slurmstepd. The answer has the ranks that run, after `kill` those that have survived SIGKILL, and also tasks
# that wait for their forked rank.

#: A killed process ends within this time, unless it waits for a device or a file system.
KILL_S = 5.0


def ranks_on_nodes(
    run: RunDir, action: Literal["list", "kill"], nodes: JobNodes, env: Mapping[str, str], *, patient: bool = True
) -> dict[str, list[int]]:
    """Return the running ranks of a run by node, for the nodes that answer; after `kill` those that have survived."""
    if not nodes.names:
        return {}
    command = [sys.executable, "-P", "-m", NODE_STEPS, action, str(run.path)]
    step = nodes_command(nodes, command if patient else announced(command))
    # It starts Python on each node, perhaps from a slow file system.
    found = ask(step, nodes.names, 60.0, env=env, patient=patient)
    return {node: list(answer["ranks"]) for node, answer in found.by_node.items()}


def kill_ranks(run: Path, node: str) -> list[int]:
    """Kill the ranks of a run on this node and their child processes; returns the ranks that survive."""
    until = time.monotonic() + KILL_S
    while (found := find_ranks(run, None, node, with_tasks=True)) and time.monotonic() < until:
        for process in found:
            for pid in family(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return [process.rank for process in found]


def main(argv: Sequence[str]) -> None:
    action, subject = argv
    if action == "watch":
        watch(subject)
    node, run = os.environ.get("SLURMD_NODENAME", ""), Path(subject)
    found = find_ranks(run, None, node, with_tasks=True) if action == "list" else []
    print_answer({"ranks": sorted(kill_ranks(run, node) if action == "kill" else [one.rank for one in found])})


if __name__ == "__main__":
    main(sys.argv[1:])
