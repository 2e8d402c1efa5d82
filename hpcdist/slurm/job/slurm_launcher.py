"""The launcher of ranks inside an allocation of Slurm: one srun step per attempt, and checks of the nodes."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from hpcdist.config.schema import Config
from hpcdist.containers.node_steps import ContainerSteps
from hpcdist.containers.runtimes import outer_env
from hpcdist.containers.spec import ContainerSpec
from hpcdist.environments.rank_environment import RankEnvironment
from hpcdist.errors import HpcdistError, PreflightError, UserMistake
from hpcdist.machine.timed_command import run_within
from hpcdist.run.attempt import Attempt
from hpcdist.run.attempt_times import Resources
from hpcdist.run.folder import RunDir
from hpcdist.run.folder_identity import require_same
from hpcdist.slurm import client
from hpcdist.slurm.current_job import CurrentJob, running_steps
from hpcdist.slurm.job.component_nodes import nodes_of
from hpcdist.slurm.job.elastic_nodes import elastic_nodes, failing_node
from hpcdist.slurm.job.environment_step import prepare_nodes
from hpcdist.slurm.job.node_parents import ParentSteps, obstacle_to_fork
from hpcdist.slurm.job.node_ranks import parse_answers
from hpcdist.slurm.job.orphaned_steps import UnkillableSteps, end_orphaned_steps
from hpcdist.slurm.job.preflight_step import Preflight
from hpcdist.slurm.job.rank_step import RankStep
from hpcdist.slurm.job.resources import job_resources
from hpcdist.slurm.job.srun import (
    PARENTS_STEP,
    STEP_NAMES,
    WATCHDOG_STEP,
    StepNodes,
    node_names_command,
    nodes_command,
    step_command,
)
from hpcdist.slurm.job.watchdog_step import WatchdogStep
from hpcdist.slurm.job_components import components, hosts_by_rank, is_het, with_nodes
from hpcdist.supervisor.plan import code_env, rank_command
from hpcdist.supervisor.process_guard import Guard

log = logging.getLogger(__name__)
#: A node that does not answer a step in this time counts as failed. Slurm's messages time out after 10 s.
NODE_ANSWER_S = 20.0
#: How long a restarted controller may take to reach its nodes; until then it starts no step on them.
REGISTRATION_S = 120.0
#: Time limit of the search for ranks, which starts Python on each node, perhaps from a slow file system.
RANKS_ON_NODES_S = 60.0


class SlurmLauncher:
    """Starts ranks with srun in the current allocation. A context manager.

    Args:
        env: environment of the ranks.
        import_path: folders at the beginning of the ranks' PYTHONPATH.
        cwd: working directory of the ranks.
        box: the container of each rank, if any.
        environment: the Python environment of the ranks, if it is not that of the supervisor.

    Raises HpcdistError if the allocation's nodes do not match the roles.
    """

    def __init__(
        self,
        run: RunDir,
        config: Config,
        job: CurrentJob,
        *,
        env: Mapping[str, str],
        import_path: Sequence[str],
        cwd: Path,
        box: ContainerSpec | None = None,
        environment: RankEnvironment | None = None,
    ) -> None:
        #: Nodes that the job must not get again.
        self.avoid: list[str] = []
        self._job = job
        outlives_nodes = config.cluster.outlives_nodes
        #: Names of each component's nodes in the allocation.
        self.nodes = [job.nodes] if outlives_nodes and job.nodes else nodes_of(config, env)
        self._het = is_het(config)
        self._run = run
        self._config = config
        # Ranks need their environment even if the job was submitted with --export=NONE, which some sites require.
        self._env = {**env, **code_env(import_path, env.get("PYTHONPATH")), "SLURM_EXPORT_ENV": "ALL"}
        self._cwd = cwd
        #: The nodes of each attempt, if the run goes on without failed ones; otherwise None.
        self.elastic = elastic_nodes(run, config, job, self.nodes[0], self._env) if outlives_nodes else None
        hosts = hosts_by_rank(components(self.sized), self.used_nodes)
        #: In a heterogeneous step: first rank of the component that a host belongs to.
        self._first_ranks = {host: hosts.index(own[0]) for own in self.nodes for host in own} if self._het else {}
        self._box = box
        self._environment = environment
        self._is_prepared = environment is None
        self._python = box.python if box else environment.python if environment else sys.executable
        self._containers = ContainerSteps(box, run, self._env, het=self._het) if box is not None else None
        self._parents: ParentSteps | None = None
        #: When the last attempt was started.
        self._began = time.time()
        self._preflight = Preflight(
            run, config, job, self.nodes, env=self._env, python=self._python, box=box, het=self._het
        )

    @property
    def sized(self) -> Config:
        """The config with the number of nodes of the running or next attempt."""
        if self.elastic is None:
            return self._config
        return with_nodes(self._config, len(self.elastic.pool.used))

    @property
    def used_nodes(self) -> Sequence[Sequence[str]]:
        """Names of each component's nodes in the running or next attempt."""
        return self.nodes if self.elastic is None else [self.elastic.pool.used]

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the running or next attempt."""
        return sum(part.num_ranks for part in components(self.sized))

    @property
    def resources(self) -> Resources:
        """The GPUs of the job, or its cores if it has none."""
        idle = () if self.elastic is None else self.elastic.pool.idle
        return job_resources(self.sized, self.used_nodes, self._env, idle)

    def __enter__(self) -> SlurmLauncher:
        # Steps of a killed supervisor of this job: ranks continue without their srun. `start` raises an error if they
        # do not end.
        with suppress(HpcdistError):
            self._end_orphaned_steps(WATCHDOG_STEP, PARENTS_STEP)
        self._guard = Guard()
        if self._config.cluster.fork and (obstacle := obstacle_to_fork(self._config, self._box, self._env)):
            log.warning("cluster.fork has no effect: %s", obstacle)
        elif self._config.cluster.fork:
            self._parents = ParentSteps(self._run, self._config, self._guard, env=self._env, python=self._python)
        # SLURM_JOB_ID of the last task of an array is the array's id, which addresses all tasks.
        job_id = self._env["SLURM_JOB_ID"] if self._het else self._job.id
        output = self._run.path / "attempts" / "job-watchdog.log"
        self._watchdog = WatchdogStep(job_id, self._guard, env=self._env, cwd=self._cwd, output=output)
        if self._het:
            self._watchdog.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.close()
        if self._parents is not None:
            self._parents.close()
        if self.elastic is not None:
            self.elastic.close()
        self._guard.close()

    def start(self, attempt: Attempt) -> RankStep:
        """Start all ranks, the first time after the preflight check.

        Raises HpcdistError if the ranks' containers or environment cannot start on the nodes or an earlier step does
        not end, PreflightError if the preflight check fails.
        """
        try:
            return self._start(attempt)
        except (UserMistake, PreflightError):  # of nodes that answer
            raise
        except HpcdistError:
            if self.elastic is not None:
                # A node that has died meanwhile is no reason to requeue the job.
                self._end_ranks(attempt)
            raise

    def _start(self, attempt: Attempt) -> RankStep:
        if self.elastic is not None:
            # A node that has been away may have lost its copy of the environment.
            self._is_prepared = not self.elastic.begin() and self._is_prepared
            batch_host = self._env.get("SLURMD_NODENAME") or self.nodes[0][0]
            self._watchdog.move(batch_host, self.elastic.pool.used, self.elastic.pool.present)
            if self._containers is not None:
                self._containers.present = self.elastic.pool.present
        if self._containers is not None:
            # pyxis may still be removing containers, and ending its step kills that: `prepare` removes the rest.
            self._end_orphaned_steps()
            self._containers.prepare()
        if self._environment is not None and not self._is_prepared:
            nodes, chosen = (self.nodes, False) if self.elastic is None else ([self.elastic.pool.fit], True)
            prepare_nodes(self._environment, self._run, nodes, self._env, het=self._het, chosen=chosen)
            self._is_prepared = True
        self._check_nodes(attempt)
        # Ranks of two attempts must not write to one run, and srun would wait forever for an old step's processors.
        if (left := self._end_orphaned_steps()) is not None:
            raise HpcdistError(left.reason)
        self._began = time.time()
        step_nodes = None
        if self.elastic is not None:
            step_nodes = StepNodes(self.elastic.pool.used, overlap=bool(self.elastic.abandoned))
        hosts = hosts_by_rank(components(self.sized), self.used_nodes)
        task = self._parents.task_command(self.used_nodes[0]) if self._parents is not None else None
        task = task or rank_command(self._run.path, self._python)
        command = step_command(self.sized, attempt, task, self._box, step_nodes)
        env = self._env | {"HPCDIST_ATTEMPT": str(attempt.number)}
        if len(self.nodes) > 1 and not self._het:
            hostfile = attempt.path / "hosts"
            hostfile.write_text("".join(f"{host}\n" for host in hosts))
            # Slurm sorts the nodes of a step: the first one need not be rank 0's.
            env |= {"SLURM_HOSTFILE": str(hostfile), "HPCDIST_MASTER_ADDR": hosts[0]}
            # srun would warn that the allocation's value does not fit.
            env.pop("SLURM_NTASKS_PER_NODE", None)
        if self._box is not None:
            env = outer_env(self._box, env)
        require_same(self._run.path, env)
        return RankStep(
            command,
            env,
            self.num_ranks,
            attempt,
            self._guard,
            cwd=self._cwd,
            # Without a hostfile the user may have set another --distribution.
            hosts=hosts if len(self.nodes) > 1 or self.elastic is not None else (),
            first_ranks=self._first_ranks,
            containers=self._containers,
            on_each_node=self._run_on_each_node,
            # Ranks in containers may belong to another user on the node, and cannot be listed then.
            running_ranks=self._running_ranks if self._box is None else None,
            # With pyxis in a heterogeneous job the rank opens its log itself, after its node has imported the image.
            shows_start=not (self._het and self._box is not None and self._box.runtime == "pyxis"),
            end_ranks=self._end_ranks if self.elastic is not None else None,
        )

    def _end_ranks(self, attempt: Attempt) -> bool:
        """Kill the ranks without Slurm; the removal of containers that follows leaves out nodes that do not answer."""
        assert self.elastic is not None
        left = self.elastic.end_ranks(attempt)
        if self._containers is not None:
            self._containers.present = self.elastic.answering
        return left

    def _check_nodes(self, attempt: Attempt) -> None:
        """Run the preflight check; leave out the nodes that fail it if enough others remain."""
        try:
            self._preflight.run(attempt)
        except PreflightError as error:
            blamed = self._preflight.blamed
            if self.elastic is None or not blamed or not self.elastic.drop_rejected(blamed):
                raise
            self._preflight.failed = False
            self.avoid = self._preflight.avoid
            if self._containers is not None:
                self._containers.present = self.elastic.pool.present
            log.warning("%s; continuing without %s", error, ", ".join(blamed))

    def _run_on_each_node(
        self, command: Sequence[str], *, output: Path, limit_s: float, interrupted: Callable[[], bool]
    ) -> None:
        """Run a command once on each node, outside of containers, for at most `limit_s` seconds."""
        step = nodes_command(self.used_nodes, command, het=self._het, chosen=self.elastic is not None)
        self._guard.run(step, env=self._env, cwd=self._cwd, output=output, limit_s=limit_s, interrupted=interrupted)

    def broken(self) -> str:
        """Return a sentence about nodes that do not answer or on which ranks fail repeatedly; empty without any.

        Sets `avoid` to those nodes that the partition can replace.
        """
        if self._preflight.failed:
            # No ranks were started on these nodes.
            self.avoid = self._preflight.avoid
            return f"{', '.join(self.avoid)} avoided from now on" if self.avoid else ""
        try:
            # Without the controller Slurm starts no steps, and all nodes would seem to have failed.
            running_steps(retry_s=client.JOB_RETRY_S)
            return self._lost_nodes() or self._unkillable_steps() or self._failing_node()
        except HpcdistError as error:
            return str(error)

    def _lost_nodes(self) -> str:
        """Return a sentence about nodes that do not answer."""
        command = node_names_command(self.used_nodes, het=self._het, chosen=self.elastic is not None)
        until = time.monotonic() + REGISTRATION_S
        # One of the nodes is this host, which is not lost: without any answer, the controller has started no step.
        while not (answers := run_within(command, NODE_ANSWER_S, env=self._env).stdout.split()):
            if time.monotonic() >= until:
                break
            time.sleep(1.0)
        if lost := [node for node in self._all_nodes if node not in answers]:
            # Without an idle replacement it is better to wait until this node is back.
            return f"lost {', '.join(lost)}" + self._avoid(lost, idle_only=True)
        return ""

    def _unkillable_steps(self) -> str:
        """Return a sentence about a step that does not end and keeps the processors of the next one."""
        left = self._end_orphaned_steps()
        return "" if left is None else left.reason + self._avoid(left.nodes)

    def _failing_node(self) -> str:
        """Return a sentence about a node on which ranks fail repeatedly, if the partition can replace it."""
        blamed = failing_node(self._run, self._all_nodes)
        if blamed and self._avoid([blamed]):
            return f"ranks on {blamed} have failed twice in a row, and on no other node: avoided from now on"
        return ""

    def _avoid(self, nodes: Sequence[str], *, idle_only: bool = False) -> str:
        """Set `avoid` if the partition can replace the nodes; return the end of a sentence about it, or ""."""
        self.avoid = []
        # A heterogeneous job has one list of excluded nodes per component, and Slurm shows only the leader's.
        with suppress(HpcdistError):  # keep the nodes if Slurm does not answer
            if nodes and not self._het and self._job.replaceable(nodes, idle_only=idle_only):
                self.avoid = list(nodes)
        return ", avoided from now on" if self.avoid else ""

    @property
    def _all_nodes(self) -> list[str]:
        """The nodes of the running or next attempt."""
        return [node for own in self.used_nodes for node in own]

    def _end_orphaned_steps(self, *names: str) -> UnkillableSteps | None:
        """End steps of earlier attempts; returns the steps that do not end, with the nodes that have rebooted."""
        abandoned = self.elastic.abandoned if self.elastic is not None else ()
        left = end_orphaned_steps((*STEP_NAMES, *names), self._kill_ranks, abandoned)
        if left is None or left.nodes:
            return left
        try:
            rebooted = client.nodes_booted_since(self._all_nodes, self._began)
        except HpcdistError:  # the reason stays unknown
            rebooted = []
        return left._replace(reason=left.reason + f" ({', '.join(rebooted)} has rebooted)" * bool(rebooted))

    def _kill_ranks(self) -> list[str]:
        """Kill the run's ranks on all nodes without Slurm; returns the nodes on which ranks may have survived."""
        answers = self._ranks_on_nodes("kill")
        return [node for node in self._all_nodes if answers.get(node) != []]

    def _running_ranks(self) -> set[int] | None:
        """Return the ranks of the run that run on any node; None if a node does not answer."""
        answers = self._ranks_on_nodes("list")
        return set().union(*answers.values()) if answers.keys() == set(self._all_nodes) else None

    def _ranks_on_nodes(self, action: Literal["list", "kill"]) -> Mapping[str, list[int]]:
        """Return the running ranks of each node that answers; after `kill` those that have survived."""
        words = [sys.executable, "-P", "-m", "hpcdist.slurm.job.node_ranks", str(self._run.path), action]
        step = nodes_command(self.used_nodes, words, het=self._het, chosen=self.elastic is not None)
        done = run_within(step, RANKS_ON_NODES_S, env=self._env)
        return parse_answers(done.stdout, self._all_nodes)
