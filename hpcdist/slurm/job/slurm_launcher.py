"""Starting ranks as one srun step, inside an allocation that exists already, and calling the roll of its nodes."""

from __future__ import annotations

import subprocess
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
from hpcdist.errors import HpcdistError
from hpcdist.files.atomic import read_json
from hpcdist.machine.timed_command import run_within
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir
from hpcdist.slurm import client
from hpcdist.slurm.current_job import CurrentJob, running_steps
from hpcdist.slurm.job.node_ranks import parse_answers
from hpcdist.slurm.job.orphaned_steps import UnkillableSteps, end_orphaned_steps
from hpcdist.slurm.job.preflight_step import Preflight
from hpcdist.slurm.job.rank_step import RankStep
from hpcdist.slurm.job.srun import (
    STANDBY_STEP,
    STEP_NAMES,
    beside_command,
    roll_call_command,
    standby_command,
    step_command,
)
from hpcdist.slurm.job_components import assign_nodes, components, hosts_by_rank, is_het
from hpcdist.slurm.nodelist import expand
from hpcdist.supervisor.plan import code_env, rank_command
from hpcdist.supervisor.process_guard import Guard
from hpcdist.supervisor.restart_policy import Failure, suspect

#: A node that does not answer a step in this time is taken for lost. Slurm's own messages time out after 10 s.
ROLL_CALL_S = 20.0
#: Nodes that look for ranks start a Python for it, perhaps from a slow file system.
RANKS_ON_NODES_S = 60.0


class SlurmLauncher:
    """Starts ranks with srun in the allocation that this process stands in. Use as a context manager.

    Args:
        env: what ranks inherit.
        import_path: folders that ranks import code from, before all others.
        cwd: the ranks' current folder.
        box: the container of each rank, where they have one.

    Raises HpcdistError where the allocation's nodes are not what the roles need.
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
    ) -> None:
        parts = components(config)
        self.num_ranks = sum(part.num_ranks for part in parts)
        #: Nodes of the allocation that the job shall not get again.
        self.avoid: list[str] = []
        self._job = job
        #: Names of each component's nodes.
        self.nodes = nodes_of(config, env)
        self._het = is_het(config)
        self._run = run
        self._config = config
        # Ranks live by their environment, also where the job was submitted with --export=NONE, as some sites want it.
        self._env = {**env, **code_env(import_path, env.get("PYTHONPATH")), "SLURM_EXPORT_ENV": "ALL"}
        self._cwd = cwd
        self._hosts = hosts_by_rank(parts, self.nodes)
        #: In a heterogeneous step: first rank of the component that a host belongs to.
        self._first_ranks = {host: self._hosts.index(own[0]) for own in self.nodes for host in own} if self._het else {}
        self._box = box
        self._containers = ContainerSteps(box, run, self._env, het=self._het) if box is not None else None
        #: When the last attempt was started.
        self._began = time.time()
        self._preflight = Preflight(run, config, job, self.nodes, env=self._env, box=box, het=self._het)

    def __enter__(self) -> SlurmLauncher:
        # What a supervisor of this job that was killed has left: Slurm lets ranks go on without their srun. Where it
        # does not end, `start` says so.
        with suppress(HpcdistError):
            self._end_left(STANDBY_STEP)
        self._guard = Guard()
        self._standby: subprocess.Popen[bytes] | None = None
        if self._het:
            command = standby_command(self._env["SLURM_JOB_ID"])
            log = self._run.path / "attempts" / "standby.log"
            self._standby = self._guard.start(command, env=self._env, cwd=self._cwd, output=log)
        return self

    def __exit__(self, *_: object) -> None:
        if self._standby is not None:
            # Its task ends with the job, at once.
            self._standby.kill()
            self._standby.wait()
        self._guard.close()

    def start(self, attempt: Attempt) -> RankStep:
        """Start every rank, the first time after a look at the nodes.

        Raises HpcdistError where containers cannot be started on them or an earlier step does not end, PreflightError
        where ranks should not be started.
        """
        if self._containers is not None:
            self._containers.prepare()
        self._preflight.look(attempt)
        # Two sets of ranks must never write to one run, and srun would wait for the processors of a step for ever.
        if (left := self._end_left()) is not None:
            raise HpcdistError(left.reason)
        self._began = time.time()
        rank = rank_command(self._run.path, self._box.python) if self._box else rank_command(self._run.path)
        command = step_command(self._config, attempt, rank, self._box)
        env = self._env | {"HPCDIST_ATTEMPT": str(attempt.number)}
        if len(self.nodes) > 1 and not self._het:
            hostfile = attempt.path / "hosts"
            hostfile.write_text("".join(f"{host}\n" for host in self._hosts))
            # Slurm sorts the step's nodes, so the first of them need not be rank 0's.
            env |= {"SLURM_HOSTFILE": str(hostfile), "HPCDIST_MASTER_ADDR": self._hosts[0]}
            # Stands for the allocation, and srun would warn that it cannot be kept.
            env.pop("SLURM_NTASKS_PER_NODE", None)
        if self._box is not None:
            env = outer_env(self._box, env)
        return RankStep(
            command,
            env,
            self.num_ranks,
            attempt,
            self._guard,
            cwd=self._cwd,
            # Elsewhere the user may have chosen another --distribution.
            hosts=self._hosts if len(self.nodes) > 1 else (),
            first_ranks=self._first_ranks,
            containers=self._containers,
            beside=self._beside,
            # Ranks in containers may be another user's on the node, and then do not show.
            living=self._living if self._box is None else None,
            # There the rank opens its log by itself, once its node has imported the image.
            shows_start=not (self._het and self._box is not None and self._box.runtime == "pyxis"),
        )

    def _beside(self, command: Sequence[str], *, output: Path, limit_s: float, interrupted: Callable[[], bool]) -> None:
        """Run a command once on each node, outside of containers, within `limit_s`."""
        step = beside_command(self.nodes, command, het=self._het)
        self._guard.run(step, env=self._env, cwd=self._cwd, output=output, limit_s=limit_s, interrupted=interrupted)

    def broken(self) -> str:
        """Call the roll: a sentence about nodes that do not answer any more, or that fail while others do not.

        `avoid` then has those of them that the partition can do without.
        """
        if self._preflight.failed:
            # Nodes that are not fit have answered, and no rank was started on them.
            self.avoid = self._preflight.avoid
            return f"{', '.join(self.avoid)} avoided from now on" if self.avoid else ""
        try:
            # Without its controller Slurm starts no step, and no node would seem to answer.
            running_steps(retry_s=client.JOB_RETRY_S)
            return self._missing() or self._stuck() or self._to_blame()
        except HpcdistError as error:
            return str(error)

    def _missing(self) -> str:
        """The sentence about nodes that do not answer."""
        nodes = self._all_nodes
        answers = self._roll_call()
        if lost := [node for node in nodes if node not in answers]:
            # Without an idle node in its place the job is better off waiting for this one to come back.
            self.avoid = lost if self._replaceable(lost, idle_only=True) else []
            return f"lost {', '.join(lost)}" + (", avoided from now on" if self.avoid else "")
        return ""

    def _stuck(self) -> str:
        """The sentence about a step that does not end, and holds the processors that the next one needs."""
        if (left := self._end_left()) is not None:
            stuck = list(left.nodes)
            self.avoid = stuck if stuck and self._replaceable(stuck, idle_only=False) else []
            return left.reason + (", avoided from now on" if self.avoid else "")
        return ""

    def _to_blame(self) -> str:
        """The sentence about a node on which ranks fail again and again."""
        blamed = suspect([failure_of(attempt) for attempt in self._run.attempts()]) or ""
        # A host may call itself n1.site where Slurm says n1.
        named = [node for node in self._all_nodes if node in (blamed, blamed.partition(".")[0])]
        self.avoid = named if named and self._replaceable(named, idle_only=False) else []
        if not self.avoid:
            return ""
        return f"ranks on {blamed} have failed twice in a row, and on no other node: avoided from now on"

    def _replaceable(self, nodes: Sequence[str], *, idle_only: bool) -> bool:
        # A heterogeneous job has a list of nodes to avoid for each component, and Slurm tells of the leader's alone.
        try:
            return not self._het and self._job.replaceable(nodes, idle_only=idle_only)
        except HpcdistError:  # without an answer no node is given up
            return False

    @property
    def _all_nodes(self) -> list[str]:
        return [node for own in self.nodes for node in own]

    def _end_left(self, *names: str) -> UnkillableSteps | None:
        """End what is left of earlier steps; returns what does not end, with the nodes that have rebooted."""
        left = end_orphaned_steps((*STEP_NAMES, *names), self._kill_ranks)
        if left is None or left.nodes:
            return left
        try:
            rebooted = client.nodes_booted_since(self._all_nodes, self._began)
        except HpcdistError:  # it is known that the step does not end, not why
            rebooted = []
        return left._replace(reason=left.reason + f" ({', '.join(rebooted)} has rebooted)" * bool(rebooted))

    def _kill_ranks(self) -> list[str]:
        """Kill the run's ranks on all nodes, whoever their parent is; returns the nodes on which some may live on."""
        answers = self._ranks_on_nodes("kill")
        return [node for node in self._all_nodes if answers.get(node) != []]

    def _living(self) -> set[int] | None:
        """The ranks of the run that live on any node; None where a node does not answer."""
        answers = self._ranks_on_nodes("list")
        return set().union(*answers.values()) if answers.keys() == set(self._all_nodes) else None

    def _ranks_on_nodes(self, action: Literal["list", "kill"]) -> Mapping[str, list[int]]:
        """The ranks that live on each node that answers; those that are still there after `kill`."""
        words = [sys.executable, "-P", "-m", "hpcdist.slurm.job.node_ranks", str(self._run.path), action]
        done = run_within(beside_command(self.nodes, words, het=self._het), RANKS_ON_NODES_S, env=self._env)
        return parse_answers(done.stdout, self._all_nodes)

    def _roll_call(self) -> set[str]:
        command = roll_call_command(self.nodes, het=self._het)
        return set(run_within(command, ROLL_CALL_S, env=self._env).stdout.split())


def nodes_of(config: Config, env: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Names of each component's nodes, in the job whose environment this is."""
    parts = components(config)
    if is_het(config):
        return [tuple(expand(env[f"SLURM_JOB_NODELIST_HET_GROUP_{index}"])) for index in range(len(parts))]
    nodes = expand(env["SLURM_JOB_NODELIST"])
    if len(parts) == 1:
        return [tuple(nodes)]
    wants_features = len({part.constraint for part in parts}) > 1
    return assign_nodes(parts, nodes, client.node_features(nodes) if wants_features else {})


def failure_of(attempt: Attempt) -> Failure | None:
    """What the supervisor wrote down of an attempt that failed."""
    found = read_json(attempt.failure)
    return None if found is None else Failure(**found)
