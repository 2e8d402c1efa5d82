"""The launcher of ranks inside an allocation of Slurm: a step of parents that start the ranks of all attempts, checks
of the nodes, and the end of steps that were left running.
"""

import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Self

from hpcdist.config.roles import Roles
from hpcdist.config.schema import Config, role_device
from hpcdist.config.slurm_notation import expand, expand_tasks
from hpcdist.containers.container_steps import ContainerSteps, NoContainers
from hpcdist.containers.spec import IMAGE_PYTHON, ContainerSpec
from hpcdist.environments.rank_environment import RankEnvironment
from hpcdist.errors import HpcdistError, PreflightError, TopologyError, UserMistake
from hpcdist.host.log_files import LogTail, last_lines
from hpcdist.host.retry import retry
from hpcdist.host.time_limits import last_line, run_within
from hpcdist.job.elastic_nodes import ElasticNodes, FixedNodes, failing_node
from hpcdist.job.node_steps import WatchdogStep, ranks_on_nodes
from hpcdist.job.preflight_step import Preflight
from hpcdist.job.srun import STEP_NAMES, WATCHDOG_STEP, ended_tasks, step_command, step_name, task_command
from hpcdist.run.attempt_times import NodeShare, Resources
from hpcdist.run.folder import Attempt, RunDir, require_same
from hpcdist.slurm import client
from hpcdist.slurm.client import CurrentJob, UnkillableSteps, end_orphaned_steps, running_steps, signal_named_steps
from hpcdist.slurm.on_nodes import Answers, JobNodes, announced, ask, nodes_command
from hpcdist.slurm.placement import RoleNodes, hosts_by_rank, job_nodes, nodes_by_part, requested_cluster, role_nodes
from hpcdist.supervisor.children import Guard
from hpcdist.supervisor.parents import ParentRanks, RankParents
from hpcdist.supervisor.plan import code_env

log = logging.getLogger(__name__)
#: Time for srun to end after rank 0 has written its outcome; then the nodes are asked for running ranks. The
#: interval doubles each time, up to MAX_QUERY_INTERVAL_S.
SRUN_END_S = 20.0
MAX_QUERY_INTERVAL_S = 600.0
#: Time until a restarted controller has reached its nodes: before that, it starts no step.
CONTROLLER_S = 120.0
#: Pause between two steps that ask the nodes while the controller starts none.
_ASK_EVERY_S = 1.0
#: A node that does not answer within this time counts as lost: Slurm's messages time out after 10 s.
NODE_ANSWER_S = 20.0
#: Refusals of srun that pass, such as those of a restarted controller.
_MAY_PASS = re.compile(
    "contact slurm controller|not available|temporarily disabled|timed out|are busy|connect|zero bytes", re.IGNORECASE
)
#: Time for a step to end after its tasks: pyxis removes their containers.
STEP_LEAVES_S = 60.0
#: Time for a step to end after its tasks have been killed.
STEP_END_S = 20.0
#: Lines at the end of a log in which its last message is searched, because the very last ones may be empty.
_LAST_LINES = 10


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
        self._parents: RankParents | None = None
        self._is_open = False
        self._parent_nodes: Sequence[str] = ()
        self._step = ""  #: name of the parents' step
        self.hosts: Sequence[str] = ()  #: planned hosts of the ranks, if they are known
        names: Sequence[str] = ()
        if config.cluster.outlives_nodes:
            # From the controller: Slurm's variables, which `job_nodes` reads, still name nodes that the job has lost.
            names = self.job.nodes
        allocated = JobNodes(names or job_nodes(config, env))
        #: The nodes of each attempt.
        self.nodes = FixedNodes(allocated)
        if config.cluster.outlives_nodes:
            self.nodes = ElasticNodes(self.run, config, self.job, allocated.names, self._env)
        self.containers = NoContainers()
        if box is not None:
            self.containers = ContainerSteps(box, self.run, self._env, present=lambda: self.nodes.answering)
        self._preflight = Preflight(self.run, config, self.job, allocated, env=self._env, python=self._python, box=box)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the running or next attempt."""
        return sum(part.num_ranks for part in role_nodes(self.nodes.sized(self.config)))

    @property
    def resources(self) -> Resources:
        """The GPUs or cores of the running or next attempt, and the idle nodes."""
        config = self.nodes.sized(self.config)
        return job_resources(config, self.nodes.used.names, self._env, self.nodes.idle)

    def __enter__(self) -> Self:
        # Steps of a killed supervisor of this job: ranks continue without their srun. `start` raises an error if they
        # do not end.
        with suppress(HpcdistError):
            self._end_orphaned_steps(WATCHDOG_STEP)
        self.guard = Guard()
        self._is_open = True
        output = self.run.path / "attempts" / "job-watchdog.log"
        self._watchdog = WatchdogStep(self.job.id, self.guard, env=self._env, cwd=self.cwd, output=output)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of the ranks' steps; no attempt can follow."""
        if not self._is_open:
            return
        self._is_open = False
        self._watchdog.close()
        self._close_parents()
        self.nodes.close()
        self.guard.close()

    def start(self, attempt: Attempt) -> "RankStep":
        """Start the ranks of an attempt, by the parents of the last attempt if they wait on the same nodes.

        Otherwise check the nodes and start new parents. Raises HpcdistError if that fails.
        """
        self.nodes.begin()
        batch_host = self._env.get("SLURMD_NODENAME") or self.nodes.used.names[0]
        self._watchdog.move(batch_host, self.nodes.used.names, self.nodes.answering)
        if not self.parents_are_idle or self._parent_nodes != self.nodes.used.names:
            self._close_parents()
            try:
                self._parents = self._start_parents(attempt)
            except (UserMistake, PreflightError):  # all nodes answer
                raise
            except HpcdistError:
                # A node may have died since the last attempt. This notes it, so that the run can continue without it.
                self.nodes.end_ranks(step_name(attempt))
                raise
        assert self._parents is not None, "started above"
        return RankStep(self._parents, attempt, self)

    @property
    def parents_are_idle(self) -> bool:
        """Whether parents wait for the next attempt: all have reported that no process of the last one is left.

        Asked between attempts: it is also true while ranks run.
        """
        parents = self._parents
        return parents is not None and parents.are_ready and parents.is_usable and parents.is_alive()

    def _start_parents(self, attempt: Attempt) -> RankParents:
        """Check the nodes, end steps that were left running, and start the step of the parents."""
        self.containers.prepare(self._end_orphaned_steps)
        self._check_nodes(attempt)
        # Ranks of two attempts must not write to one run, and srun would wait forever for an old step's processors.
        unkillable = self._end_orphaned_steps()
        if unkillable is not None:
            raise HpcdistError(unkillable.reason)
        config = self.nodes.sized(self.config)  # with the number of nodes that this attempt uses
        used = self.nodes.used
        parts = role_nodes(config)
        hosts = hosts_by_rank(parts, used.names)
        task = task_command(self.run, self.config, self._python)
        # Only if hpcdist has chosen the nodes; else srun uses all nodes of the allocation.
        chosen = used.names if used.chosen else ()
        command = step_command(config, attempt, task, self.box, chosen, overlap=bool(self.nodes.abandoned))
        # Roles on nodes of their own: a file names the node of each rank.
        is_placed = len(parts) > 1
        env = {**self._env, "HPCDIST_ATTEMPT": str(attempt.number)}
        if is_placed:
            hostfile = attempt.path / "hosts"
            hostfile.write_text("".join(f"{host}\n" for host in hosts))
            env["SLURM_HOSTFILE"] = str(hostfile)
            # Slurm sorts the nodes of a step: the first one need not be rank 0's.
            env["HPCDIST_MASTER_ADDR"] = hosts[0]
            # srun would warn that the allocation's value does not fit.
            env.pop("SLURM_NTASKS_PER_NODE", None)
        env = dict(self.containers.env(env))
        require_same(self.run.path, env)
        # With neither a hostfile nor a list of nodes the user may have set another --distribution.
        self.hosts = hosts if is_placed or used.chosen else ()
        self._parent_nodes = used.names
        self._step = step_name(attempt)
        return RankParents(
            command,
            self.guard,
            env=env,
            cwd=self.cwd,
            output=attempt.path / "srun.log",
            num_parents=self.num_ranks,
            leave_s=STEP_LEAVES_S,
        )

    def _close_parents(self) -> None:
        if self._parents is not None:
            self._parents.close()
            self.containers.clean_up(failed=not self._parents.is_usable)
            self._parents = None

    def end_step(self) -> None:
        """End a step on every node that answers, because its parents may not have ended their ranks."""
        assert self._parents is not None, "the attempt has started"
        process = self._parents.process
        if self.nodes.end_ranks(self._step):  # Slurm cannot end the step
            self._parents.kill()
        # The step, because killing srun alone would leave its tasks running.
        elif process.poll() is None and not signal_named_steps(self._step, "KILL"):
            process.terminate()  # the step has not been created, or the controller does not answer
        try:
            process.wait(STEP_END_S)
        except subprocess.TimeoutExpired:
            self._parents.kill()

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
        if answers.keys() != set(self.nodes.used.names):
            return None
        return set().union(*answers.values())

    def examine(self, command: Sequence[str], *, limit_s: float, interrupted: Callable[[], bool]) -> str:
        """Run a command on each node and return its output; see `Ranks.examine`."""
        step = nodes_command(self.nodes.used, command)
        done = run_within(step, limit_s, env=self._env, is_enough=lambda _: interrupted())
        return done.stdout + done.stderr

    def broken(self) -> str:
        """Return why nodes are lost or fail, "" without such nodes; set `avoid` to those that can be replaced."""
        if self._preflight.failed:
            # No ranks were started on these nodes.
            self.avoid = self._preflight.avoid
            if not self.avoid:
                return ""
            return f"{', '.join(self.avoid)} avoided from now on"
        try:
            # Parents that wait for the next attempt have just answered from all nodes.
            if not self.parents_are_idle:
                reason = self._broken_step()
                if reason:
                    return reason
            names = self.nodes.used.names
            # A crash on the only node may be that of the code.
            blamed = failing_node(self.run, names) if len(names) > 1 else ""
            if blamed and self._avoid([blamed]):
                return f"ranks on {blamed} have failed twice in a row, and on no other node: avoided from now on"
        except HpcdistError as error:
            return str(error)
        return ""

    def _broken_step(self) -> str:
        """Return why no step can be started on the nodes: lost nodes, or steps that do not end; else ""."""
        # Raises an error if the controller does not answer: then no step starts, and all nodes would seem lost.
        running_steps(retry_s=client.JOB_RETRY_S)
        lost = self._lost_nodes()
        if lost:
            # Without an idle replacement it is better to wait until this node is back.
            avoided = self._avoid(lost, idle_only=True)
            return f"lost {', '.join(lost)}{avoided}"
        unkillable = self._end_orphaned_steps()
        if unkillable is not None:
            return unkillable.reason + self._avoid(unkillable.nodes)
        return ""

    def _lost_nodes(self) -> list[str]:
        """Return the nodes that do not answer; none if this host does not either, which is not the fault of nodes."""
        names = self.nodes.used.names
        this_node = self._env.get("SLURMD_NODENAME", "")
        until = time.monotonic() + CONTROLLER_S
        while True:
            answers = self._ask_nodes(self.nodes.used)
            if not answers.started and this_node:
                # A step with a lost node may start on none.
                answers = self._ask_nodes(JobNodes([this_node], chosen=True))
            if answers.started:
                return [node for node in names if node not in answers.started]
            why = last_line(answers.errors)
            may_pass = answers.was_killed or not why or _MAY_PASS.search(why) is not None
            if not may_pass or time.monotonic() > until:
                log.warning("Slurm starts no step on any node: %s", why or "no message of srun")
                return []
            time.sleep(_ASK_EVERY_S)

    def _ask_nodes(self, nodes: JobNodes) -> Answers:
        return ask(nodes_command(nodes, announced(["true"])), nodes.names, NODE_ANSWER_S, env=self._env)

    def _avoid(self, nodes: Sequence[str], *, idle_only: bool = False) -> str:
        """Set `avoid` if the partition can replace the nodes; return the end of a sentence about it, or ""."""
        self.avoid = []
        with suppress(HpcdistError):  # keep the nodes if Slurm does not answer
            if nodes and self.job.replaceable(nodes, idle_only=idle_only):
                self.avoid = list(nodes)
        return ", avoided from now on" if self.avoid else ""

    def _end_orphaned_steps(self, *names: str) -> UnkillableSteps | None:
        """End the steps that were left running, also those of further `names`; return those that do not end, if any."""
        return end_orphaned_steps((*STEP_NAMES, *names), self._kill_ranks, self.nodes.abandoned)

    def _kill_ranks(self) -> list[str]:
        """Kill the ranks of the run without Slurm.

        Returns the nodes on which ranks have survived, and those that do not answer.
        """
        survivors = ranks_on_nodes(self.run, "kill", self.nodes.used, self._env)
        return [node for node in self.nodes.used.names if survivors.get(node) != []]


class RankStep(ParentRanks):
    """The ranks of one attempt in a job. Their parents are the tasks of a step, which may outlive the attempt."""

    def __init__(self, parents: RankParents, attempt: Attempt, launcher: "SlurmLauncher") -> None:
        self.launcher = launcher
        self._next_query = math.inf  #: on the monotonic clock; infinite while no query is planned
        self._query_interval_s = SRUN_END_S
        self._seen_hosts: dict[int, str] = {}
        self._messages = LogTail(parents.output, max_news_bytes=sys.maxsize)  #: of srun; all of them
        super().__init__(parents, attempt, launcher.num_ranks, env={"HPCDIST_ATTEMPT": str(attempt.number)})

    def host_of(self, rank: int) -> str:
        """Return the node of a rank, from its parent, srun's messages or the plan; all nodes of the job if unknown."""
        host = self.parents.hosts.get(rank) or self._seen_hosts.get(rank)
        if host:
            return host
        if self.launcher.hosts:
            return self.launcher.hosts[rank]
        return os.environ["SLURM_JOB_NODELIST"]

    def wait(self, timeout_s: float) -> None:
        """Wait for reports of the parents and for messages of srun; see `ParentRanks.wait`."""
        super().wait(timeout_s)
        with suppress(OSError):  # `Watch` logs an unavailable folder
            self._note_failed_tasks(self._messages.news())
            self._query_ranks()

    def last_message(self, rank: int) -> str:
        """Return why a rank does not start: a parent's error, else the last lines of the task's log and of srun."""
        if self._error:
            return self._error
        srun_message = self._last_line(self.parents.output) or "no output of srun"
        # An error before the parent could report any, such as a missing Python.
        task_message = self._last_line(self.attempt.log(rank))
        if task_message:
            return f"{task_message} ({srun_message})"
        return srun_message

    def _last_line(self, path: Path) -> str:
        """Return the last line of a file that is not empty; "" without a file."""
        if not path.exists():
            return ""
        lines = retry(lambda: last_lines(path, _LAST_LINES), path)
        return last_line("\n".join(text for _, text in lines))

    def examine(self, command: Sequence[str], *, limit_s: float, interrupted: Callable[[], bool]) -> str:
        """Run a command on each node and return its output; see `Ranks.examine`."""
        return self.launcher.examine(command, limit_s=limit_s, interrupted=interrupted)

    def close(self) -> None:
        """Kill the ranks, and end their step unless its parents can start another attempt."""
        super().close()
        if not self.launcher.parents_are_idle:
            self.launcher.end_step()
        self.remove_sockets()

    def _note_failed_tasks(self, messages: Iterable[str]) -> None:
        """Note the ranks with failed parents; a rank's own end, which its parent has reported, counts first."""
        for text in messages:
            for rank, (host, code) in ended_tasks(text).items():
                self._seen_hosts.setdefault(rank, host)
                if rank not in self.exits:
                    self.exits[rank] = self.launcher.containers.exit_code(self.attempt, rank, host, code)

    def _note_end_of_parents(self) -> None:
        retry(lambda: self._note_failed_tasks(self._messages.news()), self.parents.output)
        self._note_failed_tasks([self._last_line(self.parents.output)])  # a killed srun may leave an incomplete line
        # Also a rank that has lost its parent has failed, even if the process ended with 0.
        code = self.parents.process.wait() or 1
        self.exits = {**self.exits, **dict.fromkeys(self.remaining, code)}

    def _query_ranks(self) -> None:
        """Find out whether ranks run after rank 0 has reported its end: srun waits forever for a killed slurmstepd."""
        now = time.monotonic()
        if self._next_query == math.inf and self.attempt.outcome(0).exists():
            self._next_query = now + self._query_interval_s
        if now < self._next_query:
            return
        if self.launcher.running_ranks() == set():
            log.warning("srun waits for ranks that have ended: their slurmstepd has probably been killed")
            self.exits |= dict.fromkeys(self.remaining, 0)  # rank 0's outcome says how the attempt ended
        self._query_interval_s = min(2 * self._query_interval_s, MAX_QUERY_INTERVAL_S)
        self._next_query = now + self._query_interval_s


# The GPUs or cores that a job's ranks use, by node. Pure functions.


def job_resources(config: Config, nodes: Sequence[str], env: Mapping[str, str], idle: Sequence[str] = ()) -> Resources:
    """Return the GPUs of a job, or the cores if it has none, on nodes with ranks and on idle ones."""
    parts = role_nodes(config)
    gpus_per_node = requested_cluster(config).gpus_per_node
    use_gpus = gpus_per_node > 0
    part_of: dict[str, RoleNodes] = {}
    for part, part_nodes in nodes_by_part(parts, nodes):
        part_of |= dict.fromkeys(part_nodes, part)
    part_of |= dict.fromkeys(idle, parts[0])  # a run with idle nodes has no `cluster.roles`, so one part
    hosts = hosts_by_rank(parts, nodes)
    roles = Roles.of(config.roles, len(hosts))
    ranks: dict[str, list[int]] = {host: [] for host in part_of}
    for rank, host in enumerate(hosts):
        role, _ = roles.of_rank(rank)
        has_gpu = part_of[host].gpus_per_node > 0 and role_device(config, role) != "cpu"
        if has_gpu or not use_gpus:
            ranks[host].append(rank)
    cores = _cores_by_node(env)
    shares = {}
    for host, part in part_of.items():
        if use_gpus:
            allocated = gpus_per_node
            requested = 1
        else:
            allocated = cores.get(host, part.tasks_per_node * part.cpus_per_task)
            requested = part.cpus_per_task
        share = min(requested, allocated / max(1, len(ranks[host])))
        shares[host] = NodeShare(allocated=allocated, share=share, ranks=ranks[host])
    return Resources(unit="GPU" if use_gpus else "core", nodes=shares, idle=tuple(idle))


def _cores_by_node(env: Mapping[str, str]) -> dict[str, int]:
    """Return the cores of the job on each node; empty if Slurm's variables do not tell them."""
    nodes = env.get("SLURM_JOB_NODELIST")
    counts = env.get("SLURM_JOB_CPUS_PER_NODE")
    if not nodes or not counts:
        return {}
    try:
        # Not strict: for a node without a number, `job_resources` takes that of the config.
        return dict(zip(expand(nodes), expand_tasks(counts), strict=False))
    except TopologyError:
        return {}
