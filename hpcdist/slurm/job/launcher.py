"""The launcher of ranks inside an allocation of Slurm: one srun step per attempt, checks of the nodes, and the
end of steps that were left running.
"""

import logging
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Self

from hpcdist.config.schema import Config, role_device
from hpcdist.config.topology import Roles, expand, expand_tasks
from hpcdist.containers.spec import IMAGE_PYTHON, ContainerSpec
from hpcdist.containers.steps import ContainerSteps, NoContainers
from hpcdist.environments.rank_environment import RankEnvironment
from hpcdist.errors import HpcdistError, PreflightError, TopologyError, UserMistake
from hpcdist.host.commands import last_line, run_within
from hpcdist.host.files import read_json
from hpcdist.host.log_files import LogTail, last_lines
from hpcdist.host.retry import retry
from hpcdist.run.folder import Attempt, RunDir, require_same
from hpcdist.run.records import NodeShare, Resources
from hpcdist.slurm import client
from hpcdist.slurm.client import CurrentJob, UnkillableSteps, end_orphaned_steps, running_steps, signal_named_steps
from hpcdist.slurm.job.elastic import ElasticNodes, FixedNodes, failing_node
from hpcdist.slurm.job.node_steps import ParentSteps, WatchdogStep, ranks_on_nodes
from hpcdist.slurm.job.preflight_step import Preflight
from hpcdist.slurm.job.srun import PARENTS_STEP, STEP_NAMES, WATCHDOG_STEP, ended_tasks, step_command, step_name
from hpcdist.slurm.on_nodes import JobNodes, announced, ask, nodes_command
from hpcdist.slurm.placement import hosts_by_rank, job_nodes, nodes_by_part, requested_cluster, role_nodes
from hpcdist.supervisor.children import Guard
from hpcdist.supervisor.plan import code_env

log = logging.getLogger(__name__)
#: Time for srun to end after rank 0 has written its outcome; then the nodes are asked for running ranks. The
#: interval doubles each time, up to MAX_QUERY_INTERVAL_S.
REPORTED_S = 20.0
MAX_QUERY_INTERVAL_S = 600.0
#: Pause after a search through the attempt's folder, as a multiple of the search's duration.
SEARCH_PAUSE = 50.0
#: Coarsest resolution of a file system's time stamps.
FOLDER_TICK_S = 2.0


@dataclass(eq=False)
class SlurmLauncher:
    """Starts ranks with srun in the current allocation. A context manager."""

    run: RunDir
    config: Config
    job: CurrentJob
    environment: RankEnvironment
    _: KW_ONLY
    import_path: Sequence[str]
    cwd: Path
    box: ContainerSpec | None = None

    def __post_init__(self) -> None:
        config, box, env = self.config, self.box, self.environment.env
        #: Nodes that the job must not get again.
        self.avoid: list[str] = []
        # Ranks need their environment even if the job was submitted with --export=NONE, which some sites require.
        self._env = {**env, **code_env(self.import_path, env.get("PYTHONPATH")), "SLURM_EXPORT_ENV": "ALL"}
        self._python = IMAGE_PYTHON if box else self.environment.python
        outlives_nodes = config.cluster.outlives_nodes
        allocated = JobNodes(self.job.nodes if outlives_nodes and self.job.nodes else job_nodes(config, env))
        #: The nodes of each attempt.
        self.nodes = FixedNodes(allocated)
        if outlives_nodes:
            self.nodes = ElasticNodes(self.run, config, self.job, allocated.names, self._env)
        self.containers = NoContainers()
        if box is not None:
            self.containers = ContainerSteps(box, self.run, self._env, present=lambda: self.nodes.answering)
        self._preflight = Preflight(self.run, config, self.job, allocated, env=self._env, python=self._python, box=box)

    @property
    def num_ranks(self) -> int:
        return sum(part.num_ranks for part in role_nodes(self.nodes.sized(self.config)))

    @property
    def resources(self) -> Resources:
        config = self.nodes.sized(self.config)
        return job_resources(config, self.nodes.used.names, self._env, self.nodes.idle)

    def __enter__(self) -> Self:
        # Steps of a killed supervisor of this job: ranks continue without their srun. `start` raises an error if they
        # do not end.
        with suppress(HpcdistError):
            self._end_orphaned_steps(WATCHDOG_STEP, PARENTS_STEP)
        self.guard = Guard()
        self._parents = ParentSteps(self.run, self.config, self.guard, env=self._env, python=self._python, box=self.box)
        output = self.run.path / "attempts" / "job-watchdog.log"
        self._watchdog = WatchdogStep(self.job.id, self.guard, env=self._env, cwd=self.cwd, output=output)
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.close()
        self._parents.close()
        self.nodes.close()
        self.guard.close()

    def start(self, attempt: Attempt) -> "RankStep":
        try:
            return self._start(attempt)
        except (UserMistake, PreflightError):  # of nodes that answer
            raise
        except HpcdistError:
            # A node that has died meanwhile is no reason to requeue the job.
            self.nodes.end_ranks(attempt)
            raise

    def _start(self, attempt: Attempt) -> "RankStep":
        self.nodes.begin()
        batch_host = self._env.get("SLURMD_NODENAME") or self.nodes.used.names[0]
        self._watchdog.move(batch_host, self.nodes.used.names, self.nodes.answering)
        self.containers.prepare(self._end_orphaned_steps)
        self._check_nodes(attempt)
        # Ranks of two attempts must not write to one run, and srun would wait forever for an old step's processors.
        if (left := self._end_orphaned_steps()) is not None:
            raise HpcdistError(left.reason)
        config, used = self.nodes.sized(self.config), self.nodes.used
        parts = role_nodes(config)
        hosts = hosts_by_rank(parts, used.names)
        command = step_command(
            config,
            attempt,
            self._parents.task_command(used.names),
            self.box,
            used.names if used.chosen else (),
            overlap=bool(self.nodes.abandoned),
        )
        is_placed = len(parts) > 1
        env = self._env | {"HPCDIST_ATTEMPT": str(attempt.number)}
        if is_placed:
            hostfile = attempt.path / "hosts"
            hostfile.write_text("".join(f"{host}\n" for host in hosts))
            # Slurm sorts the nodes of a step: the first one need not be rank 0's.
            env |= {"SLURM_HOSTFILE": str(hostfile), "HPCDIST_MASTER_ADDR": hosts[0]}
            # srun would warn that the allocation's value does not fit.
            env.pop("SLURM_NTASKS_PER_NODE", None)
        env = dict(self.containers.env(env))
        require_same(self.run.path, env)
        return RankStep(
            command,
            env,
            attempt,
            self,
            # Without a hostfile the user may have set another --distribution.
            hosts=hosts if is_placed or used.chosen else (),
        )

    def _check_nodes(self, attempt: Attempt) -> None:
        """Run the preflight check; leave out the nodes that fail it if enough others remain."""
        try:
            self._preflight.run(attempt)
        except PreflightError as error:
            blamed = self._preflight.blamed
            if not blamed or not self.nodes.drop_rejected(blamed):
                raise
            self._preflight.failed = False
            self.avoid = self._preflight.avoid
            log.warning("%s; continuing without %s", error, ", ".join(blamed))

    def running_ranks(self) -> set[int] | None:
        """Return the ranks of the run that run on any node; None if a node does not answer."""
        answers = ranks_on_nodes(self.run, "list", self.nodes.used, self._env)
        return set().union(*answers.values()) if answers.keys() == {*self.nodes.used.names} else None

    def examine(self, command: Sequence[str], *, limit_s: float, interrupted: Callable[[], bool]) -> str:
        step = nodes_command(self.nodes.used, command)
        done = run_within(step, limit_s, env=self._env, is_enough=lambda _: interrupted())
        return done.stdout + done.stderr

    def broken(self) -> str:
        """Return why nodes are lost or fail, "" without such nodes; set `avoid` to those that can be replaced."""
        if self._preflight.failed:
            # No ranks were started on these nodes.
            self.avoid = self._preflight.avoid
            return f"{', '.join(self.avoid)} avoided from now on" if self.avoid else ""
        try:
            # Without the controller Slurm starts no steps, and all nodes would seem to have failed.
            running_steps(retry_s=client.JOB_RETRY_S)
            if lost := self._lost_nodes():
                # Without an idle replacement it is better to wait until this node is back.
                return f"lost {', '.join(lost)}" + self._avoid(lost, idle_only=True)
            if (left := self._end_orphaned_steps()) is not None:
                return left.reason + self._avoid(left.nodes)
            blamed = failing_node(self.run, self.nodes.used.names)
            if blamed and self._avoid([blamed]):
                return f"ranks on {blamed} have failed twice in a row, and on no other node: avoided from now on"
        except HpcdistError as error:
            return str(error)
        return ""

    def _lost_nodes(self) -> list[str]:
        names, step = self.nodes.used.names, nodes_command(self.nodes.used, announced(["true"]))
        until = time.monotonic() + 120.0  # until a restarted controller has reached its nodes, it starts no step there
        # One of the nodes is this host, which is not lost: without any answer, the controller has started no step.
        # A node that does not answer within 20 s counts as failed: Slurm's messages time out after 10 s.
        while not (alive := ask(step, names, 20.0, env=self._env).started) and time.monotonic() < until:
            time.sleep(1.0)
        return [node for node in names if node not in alive]

    def _avoid(self, nodes: Sequence[str], *, idle_only: bool = False) -> str:
        """Set `avoid` if the partition can replace the nodes; return the end of a sentence about it, or ""."""
        self.avoid = []
        with suppress(HpcdistError):  # keep the nodes if Slurm does not answer
            if nodes and self.job.replaceable(nodes, idle_only=idle_only):
                self.avoid = list(nodes)
        return ", avoided from now on" if self.avoid else ""

    def _end_orphaned_steps(self, *names: str) -> UnkillableSteps | None:
        return end_orphaned_steps((*STEP_NAMES, *names), self._kill_ranks, self.nodes.abandoned)

    def _kill_ranks(self) -> list[str]:
        answers = ranks_on_nodes(self.run, "kill", self.nodes.used, self._env)
        return [node for node in self.nodes.used.names if answers.get(node) != []]


@dataclass(eq=False)
class RankStep:
    """The ranks of one attempt, as one srun process; outcome files are searched when the attempt's folder changes."""

    command: Sequence[str]
    env: Mapping[str, str]
    attempt: Attempt
    launcher: SlurmLauncher
    _: KW_ONLY
    hosts: Sequence[str] = ()  #: planned hosts of the ranks, if they are known

    def __post_init__(self) -> None:
        self._next_query: float | None = None
        self._query_interval_s = REPORTED_S
        self._num_ranks = self.launcher.num_ranks  # those of the launcher may change for the next attempt
        self.exits: dict[int, int] = {}
        self._seen_hosts: dict[int, str] = {}
        self._folder_time: int | None = None
        self._changed_at = 0.0
        self._search_again = True
        self._next_search = 0.0
        self._reported: set[int] = set()
        self._log = self.attempt.path / "srun.log"
        self._messages = LogTail(self._log, max_news_bytes=sys.maxsize)
        self._process = self.launcher.guard.start(self.command, env=self.env, cwd=self.launcher.cwd, output=self._log)
        self._descriptor = os.pidfd_open(self._process.pid)

    @property
    def remaining(self) -> list[int]:
        return [rank for rank in range(self._num_ranks) if rank not in self.exits]

    def host_of(self, rank: int) -> str:
        """Return the host from srun's messages or the heartbeat; before these the planned host, or the allocation."""
        planned = self.hosts[rank] if self.hosts else os.environ["SLURM_JOB_NODELIST"]
        beat = read_json(self.attempt.beat(rank)) or {}
        return str(self._seen_hosts.get(rank) or beat.get("host") or planned)

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the step, at most `timeout_s`, and note the ranks that have ended in `exits`."""
        # srun waits for the tasks of a failed node, so messages and outcome files are evaluated before it ends.
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        ended = bool(poll.poll(timeout_s * 1000))
        if not ended:
            with suppress(OSError):  # `Watch` logs an unavailable folder
                self._poll(ended=False)
            if self._next_query is not None and time.monotonic() > self._next_query:
                # srun waits forever for the tasks of a killed slurmstepd.
                if self.launcher.running_ranks() == set():
                    log.warning("srun waits for ranks that have ended: their slurmstepd has probably been killed")
                    self.exits |= dict.fromkeys(self.remaining, 0)
                self._query_interval_s = min(2 * self._query_interval_s, MAX_QUERY_INTERVAL_S)
                self._next_query = time.monotonic() + self._query_interval_s
        else:
            retry(lambda: self._poll(ended=True), self.attempt.path)
            code = self._process.wait()
            if code != 0 and not any(self.exits.values()):
                self.exits.setdefault(0, code)
            self.exits |= dict.fromkeys(self.remaining, 0)

    def absent(self) -> list[int]:
        """Return the ranks without any file in the attempt's folder."""
        # Listing the folder refreshes a network file system's cache; opening a single file does not.
        names = retry(lambda: os.listdir(self.attempt.path), self.attempt.path)
        # Its log, which Slurm opens when it starts the rank, or a file that the rank wrote.
        matches = (re.match(r"\.?rank-(\d+)\.", name) for name in names)
        started = {int(match[1]) for match in matches if match}
        return [rank for rank in range(self._num_ranks) if rank not in started]

    def last_message(self) -> str:
        lines = retry(lambda: last_lines(self._log, 10), self._log)  # the last ones may be empty
        return last_line("\n".join(text for _, text in lines)) or "no output of srun"

    def _poll(self, *, ended: bool) -> None:
        for text in self._messages.news():
            self._count_exits(text)
        if ended:
            self._count_exits(self.last_message())  # a killed srun may leave an incomplete line
        self._find_failures(in_any_case=ended)

    def _count_exits(self, text: str) -> None:
        for rank, (host, code) in ended_tasks(text).items():
            self._seen_hosts.setdefault(rank, host)
            if rank not in self.exits:
                self.exits[rank] = self.launcher.containers.exit_code(self.attempt, rank, host, code)

    def _find_failures(self, *, in_any_case: bool) -> None:
        began = time.monotonic()
        changed = os.stat(self.attempt.path).st_mtime_ns
        if changed != self._folder_time:
            self._folder_time, self._changed_at, self._search_again = changed, began, True
        if not in_any_case and (not self._search_again or began < self._next_search):
            return
        # A further change within the resolution of the folder's time stamp does not change the time stamp.
        self._search_again = began < self._changed_at + FOLDER_TICK_S
        outcomes = self.attempt.outcomes(skip=self._reported)
        self._reported |= outcomes.keys()
        for rank, outcome in sorted(outcomes.items(), key=lambda item: float(item[1]["time"])):
            if outcome["outcome"] in ("failed", "rejected"):
                self.exits.setdefault(rank, 2 if outcome["outcome"] == "rejected" else 1)
            elif rank == 0:
                self._next_query = began + self._query_interval_s
        # While thousands of ranks create their files the folder changes all the time.
        now = time.monotonic()
        self._next_search = now + SEARCH_PAUSE * (now - began)

    def signal(self, number: signal.Signals) -> None:
        signal_named_steps(step_name(self.attempt), number.name.removeprefix("SIG"))

    def examine(self, command: Sequence[str], *, limit_s: float, interrupted: Callable[[], bool]) -> str:
        return self.launcher.examine(command, limit_s=limit_s, interrupted=interrupted)

    def close(self) -> None:
        """End the step on every node that answers, and srun with it."""
        failed = self._process.poll() is None or any(self.exits.values())
        left = failed and self.launcher.nodes.end_ranks(self.attempt)
        if self._process.poll() is None:
            if left:
                os.killpg(self._process.pid, signal.SIGKILL)
            # Killing srun alone would leave its tasks running.
            elif not signal_named_steps(step_name(self.attempt), "KILL"):
                self._process.terminate()  # the step has not been created, or the controller does not answer
            try:
                self._process.wait(20.0)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self.launcher.containers.clean_up(failed=failed)
        self.launcher.guard.forget(self._process.pid)
        os.close(self._descriptor)


# The GPUs or cores that a job's ranks use, by node. Pure functions.


def job_resources(config: Config, nodes: Sequence[str], env: Mapping[str, str], idle: Sequence[str] = ()) -> Resources:
    """Return the GPUs of a job, or the cores if it has none, on nodes with ranks and on idle ones."""
    parts = role_nodes(config)
    whole = requested_cluster(config)
    use_gpus = whole.gpus_per_node > 0
    own = {host: part for part, names in nodes_by_part(parts, nodes) for host in names}
    own |= dict.fromkeys(idle, parts[0])
    cores = _cores_by_node(env)
    hosts = hosts_by_rank(parts, nodes)
    roles = Roles.of(config.roles, len(hosts))
    ranks: dict[str, list[int]] = {host: [] for host in own}
    for rank, host in enumerate(hosts):
        has_gpus = own[host].gpus_per_node and role_device(config, roles.of_rank(rank)[0]) != "cpu"
        if has_gpus or not use_gpus:
            ranks[host].append(rank)
    shares = {}
    for host, part in own.items():
        if use_gpus:
            allocated, each = whole.gpus_per_node, 1
        else:
            allocated, each = cores.get(host, part.tasks_per_node * part.cpus_per_task), part.cpus_per_task
        share = min(each, allocated / max(1, len(ranks[host])))
        shares[host] = NodeShare(allocated=allocated, share=share, ranks=ranks[host])
    return Resources(unit="GPU" if use_gpus else "core", nodes=shares, idle=tuple(idle))


def _cores_by_node(env: Mapping[str, str]) -> dict[str, int]:
    """Return the cores of the job on each node; empty if Slurm's variables do not tell them."""
    nodes, counts = env.get("SLURM_JOB_NODELIST"), env.get("SLURM_JOB_CPUS_PER_NODE")
    if not nodes or not counts:
        return {}
    try:
        return dict(zip(expand(nodes), expand_tasks(counts), strict=False))
    except TopologyError:
        return {}
