"""The launcher of ranks inside an allocation of Slurm: one srun step per attempt, checks of the nodes, the ranks'
environment on each node, and the end of steps that were left running.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpcdist.config.schema import Config, role_device
from hpcdist.config.topology import Roles
from hpcdist.containers.spec import ContainerSpec
from hpcdist.containers.steps import ContainerSteps, NoContainers
from hpcdist.environments.rank_environment import RankEnvironment, prepare_nodes
from hpcdist.errors import HpcdistError, PreflightError, TopologyError, UserMistake
from hpcdist.host.nodelist import expand, expand_tasks
from hpcdist.run.folder import Attempt, RunDir, require_same
from hpcdist.run.records import NodeShare, Resources
from hpcdist.slurm import client
from hpcdist.slurm.components import allocations, assign_nodes, components, hosts_by_rank, is_het
from hpcdist.slurm.current_job import CurrentJob, UnkillableSteps, end_orphaned_steps, running_steps
from hpcdist.slurm.job.elastic import ElasticNodes, FixedNodes, failing_node
from hpcdist.slurm.job.node_parents import ParentSteps
from hpcdist.slurm.job.node_ranks import ranks_on_nodes
from hpcdist.slurm.job.preflight_step import Preflight
from hpcdist.slurm.job.rank_step import RankStep
from hpcdist.slurm.job.srun import PARENTS_STEP, STEP_NAMES, WATCHDOG_STEP, step_command
from hpcdist.slurm.job.watchdog import WatchdogStep
from hpcdist.slurm.on_nodes import JobNodes, announced, ask, nodes_command
from hpcdist.supervisor.launcher import Guard
from hpcdist.supervisor.plan import code_env

log = logging.getLogger(__name__)
#: A node that does not answer a step in this time counts as failed. Slurm's messages time out after 10 s.
NODE_ANSWER_S = 20.0
#: How long a restarted controller may take to reach its nodes; until then it starts no step on them.
REGISTRATION_S = 120.0


class SlurmLauncher:
    """Starts ranks with srun in the current allocation. A context manager.

    Args:
        import_path: folders at the beginning of the ranks' PYTHONPATH.

    Raises HpcdistError if the allocation's nodes do not match the roles.
    """

    def __init__(
        self,
        run: RunDir,
        config: Config,
        job: CurrentJob,
        environment: RankEnvironment,
        *,
        import_path: Sequence[str],
        cwd: Path,
        box: ContainerSpec | None = None,
    ) -> None:
        #: Nodes that the job must not get again.
        self.avoid: list[str] = []
        self._run = run
        self._config = config
        self._job = job
        self._environment = environment
        self._is_prepared = False
        self._cwd = cwd
        self._box = box
        self._het = is_het(config)
        env = environment.env
        # Ranks need their environment even if the job was submitted with --export=NONE, which some sites require.
        self._env = {**env, **code_env(import_path, env.get("PYTHONPATH")), "SLURM_EXPORT_ENV": "ALL"}
        self._python = box.python if box else environment.python
        outlives_nodes = config.cluster.outlives_nodes
        allocated = JobNodes([job.nodes] if outlives_nodes and job.nodes else nodes_of(config, env), het=self._het)
        #: The nodes of each attempt.
        self.nodes = FixedNodes(allocated)
        if outlives_nodes:
            self.nodes = ElasticNodes(run, config, job, allocated.names, self._env)
        self._hosts = hosts_by_rank(components(self.nodes.sized(config)), self.nodes.used.by_component)
        self._containers = NoContainers()
        if box is not None:
            self._containers = ContainerSteps(box, run, self._env, het=self._het, present=lambda: self.nodes.answering)
        #: When the last attempt was started.
        self._began = time.time()
        self._preflight = Preflight(run, config, job, allocated, env=self._env, python=self._python, box=box)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the running or next attempt."""
        return sum(part.num_ranks for part in components(self.nodes.sized(self._config)))

    @property
    def resources(self) -> Resources:
        """The GPUs of the job, or its cores if it has none."""
        config = self.nodes.sized(self._config)
        return job_resources(config, self.nodes.used.by_component, self._env, self.nodes.idle)

    def __enter__(self) -> SlurmLauncher:
        # Steps of a killed supervisor of this job: ranks continue without their srun. `start` raises an error if they
        # do not end.
        with suppress(HpcdistError):
            self._end_orphaned_steps(WATCHDOG_STEP, PARENTS_STEP)
        self._guard = Guard()
        self._parents = ParentSteps(
            self._run, self._config, self._guard, env=self._env, python=self._python, box=self._box
        )
        # SLURM_JOB_ID of the last task of an array is the array's id, which addresses all tasks.
        job_id = self._env["SLURM_JOB_ID"] if self._het else self._job.id
        output = self._run.path / "attempts" / "job-watchdog.log"
        self._watchdog = WatchdogStep(job_id, self._guard, env=self._env, cwd=self._cwd, output=output)
        if self._het:
            self._watchdog.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.close()
        self._parents.close()
        self.nodes.close()
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
            # A node that has died meanwhile is no reason to requeue the job.
            self.nodes.end_ranks(attempt)
            raise

    def _start(self, attempt: Attempt) -> RankStep:
        # A node that has been away may have lost its copy of the environment.
        self._is_prepared = not self.nodes.begin() and self._is_prepared
        batch_host = self._env.get("SLURMD_NODENAME") or self.nodes.used.names[0]
        self._watchdog.move(batch_host, self.nodes.used.names, self.nodes.answering)
        self._containers.prepare(self._end_orphaned_steps)
        if not self._is_prepared:
            prepare_nodes(self._environment, self._run, self.nodes.fit, self._env)
            self._is_prepared = True
        self._check_nodes(attempt)
        # Ranks of two attempts must not write to one run, and srun would wait forever for an old step's processors.
        if (left := self._end_orphaned_steps()) is not None:
            raise HpcdistError(left.reason)
        self._began = time.time()
        config, used = self.nodes.sized(self._config), self.nodes.used
        self._hosts = hosts_by_rank(components(config), used.by_component)
        command = step_command(
            config,
            attempt,
            self._parents.task_command(used.names),
            self._box,
            used.names if used.chosen else (),
            overlap=bool(self.nodes.abandoned),
        )
        is_placed = len(used.by_component) > 1 and not self._het
        env = self._env | {"HPCDIST_ATTEMPT": str(attempt.number)}
        if is_placed:
            hostfile = attempt.path / "hosts"
            hostfile.write_text("".join(f"{host}\n" for host in self._hosts))
            # Slurm sorts the nodes of a step: the first one need not be rank 0's.
            env |= {"SLURM_HOSTFILE": str(hostfile), "HPCDIST_MASTER_ADDR": self._hosts[0]}
            # srun would warn that the allocation's value does not fit.
            env.pop("SLURM_NTASKS_PER_NODE", None)
        env = dict(self._containers.env(env))
        require_same(self._run.path, env)
        return RankStep(
            command,
            env,
            self.num_ranks,
            attempt,
            self._guard,
            self,
            self._containers,
            cwd=self._cwd,
            # Without a hostfile the user may have set another --distribution.
            hosts=self._hosts if len(used.by_component) > 1 or used.chosen else (),
            first_ranks=self._first_ranks() if self._het else {},
            # With pyxis in a heterogeneous job the rank opens its log itself, after its node has imported the image.
            shows_start=not (self._het and self._box is not None and self._box.runtime == "pyxis"),
        )

    def _first_ranks(self) -> dict[str, int]:
        """Return the first rank of the component that a host belongs to."""
        return {host: self._hosts.index(own[0]) for own in self.nodes.used.by_component for host in own}

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

    # The step of the ranks asks for these.

    def end_ranks(self, attempt: Attempt) -> bool:
        """Kill the ranks without Slurm if a node may be lost; return whether Slurm cannot end the attempt's step."""
        return self.nodes.end_ranks(attempt)

    def running_ranks(self) -> set[int] | None:
        """Return the ranks of the run that run on any node; None if a node does not answer.

        Ranks in containers may belong to another user on the node, and cannot be listed then.
        """
        if self._box is not None:
            return None
        answers = ranks_on_nodes(self._run, "list", self.nodes.used, self._env)
        return set().union(*answers.values()) if answers.keys() == {*self.nodes.used.names} else None

    def examine(self, command: Sequence[str], *, output: Path, limit_s: float, interrupted: Callable[[], bool]) -> None:
        """Run a command once on each node, outside of containers; see `Ranks.examine`."""
        step = nodes_command(self.nodes.used, command)
        self._guard.run(step, env=self._env, cwd=self._cwd, output=output, limit_s=limit_s, interrupted=interrupted)

    # After a failure.

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
        names, step = self.nodes.used.names, nodes_command(self.nodes.used, announced(["true"]))
        until = time.monotonic() + REGISTRATION_S
        # One of the nodes is this host, which is not lost: without any answer, the controller has started no step.
        while not (alive := ask(step, names, NODE_ANSWER_S, env=self._env).started) and time.monotonic() < until:
            time.sleep(1.0)
        if lost := [node for node in names if node not in alive]:
            # Without an idle replacement it is better to wait until this node is back.
            return f"lost {', '.join(lost)}" + self._avoid(lost, idle_only=True)
        return ""

    def _unkillable_steps(self) -> str:
        """Return a sentence about a step that does not end and keeps the processors of the next one."""
        left = self._end_orphaned_steps()
        return "" if left is None else left.reason + self._avoid(left.nodes)

    def _failing_node(self) -> str:
        """Return a sentence about a node on which ranks fail repeatedly, if the partition can replace it."""
        blamed = failing_node(self._run, self.nodes.used.names)
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

    def _end_orphaned_steps(self, *names: str) -> UnkillableSteps | None:
        """End steps of earlier attempts; returns the steps that do not end, with the nodes that have rebooted."""
        left = end_orphaned_steps((*STEP_NAMES, *names), self._kill_ranks, self.nodes.abandoned)
        if left is None or left.nodes:
            return left
        try:
            rebooted = client.nodes_booted_since(self.nodes.used.names, self._began)
        except HpcdistError:  # the reason stays unknown
            rebooted = []
        return left._replace(reason=left.reason + f" ({', '.join(rebooted)} has rebooted)" * bool(rebooted))

    def _kill_ranks(self) -> list[str]:
        """Kill the run's ranks on all nodes without Slurm; returns the nodes on which ranks may have survived."""
        answers = ranks_on_nodes(self._run, "kill", self.nodes.used, self._env)
        return [node for node in self.nodes.used.names if answers.get(node) != []]


# The GPUs or cores that a job's ranks use, by node. Pure functions.


def job_resources(
    config: Config, nodes: Sequence[Sequence[str]], env: Mapping[str, str], idle: Sequence[str] = ()
) -> Resources:
    """Return the resources of a job: GPUs if it has requested any, otherwise cores.

    Args:
        nodes: names of the nodes with ranks, by component.
        idle: names of the other nodes of a job with one component.
    """
    parts = components(config)
    hosts, roles = hosts_by_rank(parts, nodes), Roles.of(config.roles, sum(part.num_ranks for part in parts))
    own = {host: part for part, names in zip(parts, nodes, strict=True) for host in names}
    own |= dict.fromkeys(idle, parts[0])
    use_gpus, cores = any(part.gpus_per_node for part in parts), _cores_by_node(env)
    whole = None if is_het(config) else allocations(config)[0]
    ranks: dict[str, list[int]] = {host: [] for host in own}
    for rank, host in enumerate(hosts):
        has_gpus = own[host].gpus_per_node and role_device(config, roles.of_rank(rank)[0]) != "cpu"
        if has_gpus or not use_gpus:
            ranks[host].append(rank)
    shares = {}
    for host, part in own.items():
        if use_gpus:
            allocated, each = (whole or part).gpus_per_node, 1
        else:
            allocated, each = cores.get(host, part.tasks_per_node * part.cpus_per_task), part.cpus_per_task
        share = min(each, allocated / max(1, len(ranks[host])))
        shares[host] = NodeShare(allocated=allocated, share=share, ranks=ranks[host])
    return Resources(unit="GPU" if use_gpus else "core", nodes=shares, idle=tuple(idle))


def _cores_by_node(env: Mapping[str, str]) -> dict[str, int]:
    """Return the allocated cores of each node, from the variables of a plain or a heterogeneous job."""
    found: dict[str, int] = {}
    for suffix in ("", *(f"_HET_GROUP_{index}" for index in range(int(env.get("SLURM_HET_SIZE") or 0)))):
        names, counts = (env.get(f"SLURM_JOB_{name}{suffix}", "") for name in ("NODELIST", "CPUS_PER_NODE"))
        if names and counts:
            with suppress(TopologyError):
                found |= dict(zip(expand(names), expand_tasks(counts), strict=False))
    return found


# Names of a job's nodes, by component.


def nodes_of(config: Config, env: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the names of each component's nodes, from the environment of a job."""
    parts = components(config)
    if is_het(config):
        return [tuple(expand(env[f"SLURM_JOB_NODELIST_HET_GROUP_{index}"])) for index in range(len(parts))]
    nodes = expand(env["SLURM_JOB_NODELIST"])
    if len(parts) == 1:
        return [tuple(nodes)]
    wants_features = len({part.constraint for part in parts}) > 1
    return assign_nodes(parts, nodes, client.node_features(nodes) if wants_features else {})
