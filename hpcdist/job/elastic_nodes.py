"""A run that continues in its allocation without failed nodes, and uses them again when they answer."""

import errno
import logging
import select
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from hpcdist.config.schema import Config
from hpcdist.config.topology import port_for
from hpcdist.containers.runtimes import CONTAINERS_STEP
from hpcdist.errors import HpcdistError
from hpcdist.host.json_files import read_json
from hpcdist.job.node_steps import ranks_on_nodes
from hpcdist.job.srun import PREFLIGHT_STEP
from hpcdist.run.checkpoint_files import newest_step
from hpcdist.run.folder import RunDir
from hpcdist.slurm.client import CurrentJob
from hpcdist.slurm.on_nodes import NODES_STEP, JobNodes
from hpcdist.supervisor.protocols import NodeChanges
from hpcdist.supervisor.restart_policy import Failure, suspect

# The nodes of an allocation: those of the next attempt, spare ones, and those that are left out. No side effects.

#: A node that is lost this often is not used again in this allocation.
MAX_LOSSES = 2


class NodePool:
    """Chooses the nodes of each attempt of a run with interchangeable nodes.

    The run requests `most` nodes, may continue with `least`, and leaves `spare` idle until a node fails.
    """

    def __init__(self, allocated: Sequence[str], *, most: int, least: int, spare: int = 0) -> None:
        self._allocated = tuple(allocated)
        self._least = least
        self._target = max(least, min(most, len(allocated) - spare))
        self._losses: dict[str, int] = {}
        self._unfit: set[str] = set()
        self._lost: set[str] = set()
        #: The nodes of the next attempt, in Slurm's order.
        self.used: tuple[str, ...] = self._allocated[: self._target]

    @property
    def present(self) -> tuple[str, ...]:
        """The nodes on which steps can run: all that are not lost."""
        return tuple(node for node in self._allocated if node not in self._lost)

    @property
    def idle(self) -> tuple[str, ...]:
        return tuple(node for node in self.present if node not in self.used)

    @property
    def missing(self) -> tuple[str, ...]:
        """The lost nodes with which the run would become larger if they answered again."""
        if len(self.used) >= self._target:
            return ()
        return tuple(node for node in self._allocated if node in self._lost and self._losses[node] < MAX_LOSSES)

    def can_lose(self, nodes: Collection[str]) -> bool:
        return len(self._allocated) - len(self._lost | self._unfit | set(nodes)) >= self._least

    def drop_silent(self, nodes: Collection[str]) -> bool:
        """Continue without nodes that do not answer; see `_replace`."""
        lost = self._lost | set(nodes)
        if not self._replace(lost | self._unfit):
            return False
        for node in set(nodes) - self._lost:
            self._losses[node] = self._losses.get(node, 0) + 1
        self._lost = lost
        return True

    def drop_unfit(self, nodes: Collection[str]) -> bool:
        """Continue without nodes that answer but are not fit for ranks; see `_replace`."""
        if not self._replace(self._lost | self._unfit | set(nodes)):
            return False
        self._unfit |= set(nodes)
        return True

    def restore(self, nodes: Iterable[str]) -> None:
        self._lost -= set(nodes)
        self._replace(self._lost | self._unfit)

    def keep_idle(self, nodes: Collection[str]) -> None:
        """Count lost nodes that answer as idle again, unless they were lost too often or the run could grow."""
        if len(self.used) >= self._target:
            self._lost -= {node for node in nodes if self._losses[node] < MAX_LOSSES}

    def forget(self, nodes: Iterable[str]) -> None:
        """Stop waiting for lost nodes that do not belong to the allocation any more."""
        self._losses |= dict.fromkeys(nodes, MAX_LOSSES)

    def _replace(self, out: Collection[str]) -> bool:
        """Choose nodes without those in `out`; return whether enough are left. If not, nothing changes."""
        # Nodes of the last attempt come first, so that ranks stay where their files are cached.
        fit = [node for node in self._allocated if node not in out]
        chosen = sorted(fit, key=lambda node: node not in self.used)[: self._target]
        if len(chosen) < self._least:
            return False
        self.used = tuple(node for node in self._allocated if node in chosen)
        return True


# Detection of nodes that do not answer any more, by connections that need no service on the node.
#
# A node without power does not close its connections: its peers wait, and Slurm notices it after `SlurmdTimeout`, 300 s
# by default. The kernel of a node that lives accepts or refuses a connection at once. Nodes that have never answered,
# for example behind a firewall that drops packets, are not judged.

#: Shortest time between two connections to a node; with many nodes it is longer.
PROBE_EVERY_S = 1.0
#: A node that has not answered for this time, and for three intervals, is lost.
SILENT_S = 4.0
#: After a pause between two calls of `silent`, as of a suspended process, no more than this counts.
PAUSE_S = 1.0


@dataclass
class _Node:
    address: str
    connection: socket.socket | None = None
    began: float = 0.0  #: time of the last connection
    answered: float | None = None  #: time of the last answer

    def connect(self, port: int, now: float) -> None:
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self.began, self.connection = now, socket.socket(family, socket.SOCK_STREAM)
        self.connection.setblocking(False)
        code = self.connection.connect_ex((self.address, port))
        if code != errno.EINPROGRESS:
            self.end(code, now)

    def end(self, code: int, now: float) -> None:
        """Close the connection, if there is one; `code` is the error with which it has ended."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if code in (0, errno.ECONNREFUSED, errno.ECONNRESET):
            self.answered = now


class HostProbe:
    """Finds the nodes that have answered before and do not answer any more. No threads: `silent` does all the work.

    Nothing has to listen on the port.
    """

    def __init__(self, addresses: Mapping[str, str], port: int) -> None:
        self._nodes = {name: _Node(address) for name, address in addresses.items()}
        self._port = port
        self._every_s = max(PROBE_EVERY_S, len(self._nodes) / 200)  # 200 connections a second to all nodes together
        self._last_call = time.monotonic()

    def silent(self, for_s: float = SILENT_S) -> list[str]:
        """Return the nodes that have not answered for some time. Call it several times a second."""
        now = time.monotonic()
        pause_s, self._last_call = max(0.0, now - self._last_call - PAUSE_S), now
        limit_s = max(for_s, 3 * self._every_s)
        poll = select.poll()
        for node in self._nodes.values():
            if node.connection is not None:
                poll.register(node.connection, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll(0)}
        found = []
        for name, node in self._nodes.items():
            if node.connection is not None:
                if node.connection.fileno() in ready:
                    node.end(node.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), now)
                elif now - node.began > 1.5:  # without an answer
                    node.end(errno.ETIMEDOUT, now)
            if node.connection is None and now - node.began >= self._every_s:
                node.connect(self._port, now)
            if node.answered is not None:
                node.answered = min(now, node.answered + pause_s)
                if now - node.answered > limit_s:
                    found.append(name)
        return found

    def close(self) -> None:
        for node in self._nodes.values():
            node.end(errno.ECANCELED, 0.0)


def addresses_of(nodes: Iterable[str]) -> dict[str, str]:
    found = {}
    for node in nodes:
        with suppress(OSError):
            found[node] = str(socket.getaddrinfo(node, None, type=socket.SOCK_STREAM)[0][4][0])
    return found


# A run that goes on in its allocation without failed nodes, and with them when they answer again.
#
# Slurm notices a dead node only after `SlurmdTimeout`. Until then the processes of a step on that node never end for
# Slurm, and neither does the step. So ranks are killed on each node that answers, without Slurm, the step is abandoned,
# and the next step overlaps it on the other nodes.

log = logging.getLogger(__name__)
#: Interval of checks for a new checkpoint and for lost nodes that answer again.
CHECK_EVERY_S = 5.0


class FixedNodes(NodeChanges):
    def __init__(self, nodes: JobNodes) -> None:
        self._nodes = nodes
        #: Names of steps that Slurm cannot end because a node is lost. None of their ranks is left on other nodes.
        self.abandoned: set[str] = set()

    @property
    def used(self) -> JobNodes:
        """The nodes of the running or next attempt."""
        return self._nodes

    @property
    def idle(self) -> tuple[str, ...]:
        """The nodes without ranks on which steps can run."""
        return ()

    @property
    def answering(self) -> tuple[str, ...]:
        """The nodes on which steps can run, as far as is known, if these may change; otherwise empty."""
        return ()

    def sized(self, config: Config) -> Config:
        """Return the config with the number of nodes of the running or next attempt."""
        return config

    def begin(self) -> None:
        """Prepare the next attempt."""

    def drop_rejected(self, blamed: Sequence[str]) -> bool:
        """Continue without nodes that fail the preflight check; return whether enough others are left."""
        return False

    def end_ranks(self, step: str) -> bool:
        """Kill the ranks without Slurm if a node may be lost; return whether Slurm cannot end their step."""
        return False

    def close(self) -> None:
        """End the checks of nodes."""


class ElasticNodes(FixedNodes):
    """Detects lost nodes of the running attempt and chooses the nodes of the next one.

    Order of the calls for each attempt: `begin` at its start; `detect_lost` and `detect_returned` while it runs; at its
    end `end_ranks`, and then `replace_lost` after a failure or `use_returned` if it ended for more nodes.
    """

    def __init__(
        self, run: RunDir, config: Config, job: CurrentJob, nodes: Sequence[str], env: Mapping[str, str]
    ) -> None:
        super().__init__(JobNodes(nodes, chosen=True))
        cluster = config.cluster
        if len(nodes) < cluster.fewest_nodes:
            raise HpcdistError(f"job {job.id} has {len(nodes)} nodes, but cluster.min_nodes={cluster.fewest_nodes}")
        self.pool = NodePool(nodes, most=cluster.nodes, least=cluster.fewest_nodes, spare=cluster.spare_nodes)
        self._run = run
        self._job = job
        self._tasks_per_node = cluster.tasks_per_node
        self._env = env
        self._probe = HostProbe(addresses_of(nodes), port_for(env["SLURM_JOB_ID"], 0))
        self._lost: tuple[str, ...] = ()
        self._thread = ThreadPoolExecutor(1)
        self._check: Future[tuple[list[str], list[str], bool]] | None = None
        self._next_check = 0.0
        self._step_at_start: int | None = None
        self._returned: Sequence[str] = ()
        #: Lost nodes that ran no ranks.
        self._lost_idle: set[str] = set()

    @property
    def used(self) -> JobNodes:
        return JobNodes(self.pool.used, chosen=True)

    @property
    def idle(self) -> tuple[str, ...]:
        return self.pool.idle

    @property
    def answering(self) -> tuple[str, ...]:
        return tuple(node for node in self.pool.present if node not in self._lost)

    def sized(self, config: Config) -> Config:
        return replace(config, cluster=replace(config.cluster, nodes=len(self.pool.used)))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._probe.close()

    def use_returned(self) -> None:
        self.pool.restore(self._returned)

    def begin(self) -> None:
        self._returned = ()
        self._lost = ()
        self._step_at_start = newest_step(self._run)

    def drop_rejected(self, blamed: Sequence[str]) -> bool:
        if not self.pool.can_lose(blamed):
            return False
        answers = self._kill_ranks(blamed)
        if silent := [node for node in blamed if node not in answers]:
            # Slurm cannot end the steps that the check has started on them.
            self.pool.drop_silent(silent)
            self.abandoned |= {PREFLIGHT_STEP, NODES_STEP, CONTAINERS_STEP}
        if unfit := [node for node in blamed if node in answers]:
            self.pool.drop_unfit(unfit)
        return True

    def detect_lost(self) -> tuple[int, str] | None:
        silent = self._probe.silent()
        if idle := [node for node in silent if node not in self.pool.used and node in self.pool.present]:
            self.pool.drop_silent(idle)
            self._lost_idle |= set(idle)
            log.warning("%s: no answer from the node, which runs no ranks", ", ".join(idle))
        if back := self._lost_idle - set(silent):
            # `end_ranks` finds out whether they still belong to the job.
            self._lost_idle -= back
            self.pool.keep_idle(back)
        lost = [node for node in self.pool.used if node in silent]
        # With too few other nodes the run goes back into the queue, so a node is given more time to answer. Nodes that
        # were lost long ago say nothing about these.
        if not lost or not (self.pool.can_lose(lost) or set(lost) & set(self._probe.silent(30.0))):
            return None
        self._lost = tuple(lost)
        return self.pool.used.index(lost[0]) * self._tasks_per_node, lost[0]

    def end_ranks(self, step: str) -> bool:
        # A step with nodes that Slurm has taken out of the job does not start on any node.
        allocated: tuple[str, ...] = ()
        with suppress(HpcdistError):
            allocated = self._job.allocated()
        removed = [node for node in self.pool.present if node not in allocated] if allocated else []
        self._lost = tuple(dict.fromkeys((*self._lost, *(node for node in removed if node in self.pool.used))))
        if idle := [node for node in removed if node not in self.pool.used]:
            self.pool.drop_silent(idle)
        self.pool.forget(removed)
        asked = [node for node in self.pool.used if node not in self._lost]
        answers = self._kill_ranks(asked)
        if not answers:  # from no node: the controller does not answer, unless a node was lost before
            return bool(self._lost)
        self._lost = (*self._lost, *(node for node in asked if node not in answers))
        if not self._lost:
            return False
        if not any(answers.values()):
            self.abandoned |= {step, NODES_STEP, CONTAINERS_STEP}
        return True

    def _kill_ranks(self, nodes: Sequence[str]) -> dict[str, list[int]]:
        """Kill the run's ranks on nodes without Slurm; return those that survive on the nodes that answer."""
        return ranks_on_nodes(self._run, "kill", JobNodes(nodes, chosen=True), self._env, patient=False)

    def replace_lost(self) -> str:
        lost, before = self._lost, self.pool.used
        self._lost = ()
        if lost:
            chosen, why = self.pool.drop_silent(lost), "no answer from"
        elif blamed := failing_node(self._run, before):
            lost = (blamed,)
            chosen, why = self.pool.drop_unfit(lost), "ranks have failed twice in a row on"
        else:
            return ""
        if not chosen:
            return ""
        used, changes = self.pool.used, []
        if new := [node for node in used if node not in before]:
            changes.append(f"{', '.join(new)} takes over")
        if len(used) != len(before):
            changes.append(f"continuing on {len(used)} of {len(before)} nodes")
        return f"{why} {', '.join(lost)}: {', '.join(changes)}"

    def detect_returned(self) -> str:
        """Return lost nodes that answer again if a checkpoint is newer than the attempt's start; otherwise ""."""
        if self._returned:
            return ", ".join(self._returned)
        if not self.pool.missing:
            return ""
        # The nodes are checked in another thread, since this is called several times a second.
        if self._check is not None and self._check.done():
            check, self._check = self._check, None
            try:
                self._returned, gone, all_answer = check.result()
            except (HpcdistError, OSError) as error:
                log.info("the lost nodes cannot be checked: %s", error)
                return ""
            self.pool.forget(gone)
            if gone:
                log.info("Slurm has taken %s out of the job: the next requeue may replace it", ", ".join(gone))
            if not all_answer:
                self.abandoned.add(NODES_STEP)
        elif self._check is None and time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + CHECK_EVERY_S
            # Slurm could not end a step on a node that is known to be silent.
            silent = self._probe.silent()
            if missing := [node for node in self.pool.missing if node not in silent]:
                self._check = self._thread.submit(self._examine, missing, self._step_at_start)
        return ""

    def _examine(self, missing: Sequence[str], step_at_start: int | None) -> tuple[list[str], list[str], bool]:
        """Return the lost nodes that are fit again, those that left the job, and whether all others answer."""
        if newest_step(self._run) == step_at_start:
            return [], [], True
        allocated = self._job.allocated()
        gone = [node for node in missing if node not in allocated] if allocated else []
        mine = [node for node in missing if node in allocated]
        # Ranks of an earlier attempt may have survived there.
        answers = self._kill_ranks(mine)
        return [node for node in mine if answers.get(node) == []], gone, answers.keys() == set(mine)


def failing_node(run: RunDir, nodes: Sequence[str]) -> str:
    """Return the node among `nodes` on which ranks fail repeatedly; "" if there is none."""
    recorded = [read_json(attempt.failure) for attempt in run.attempts()]
    blamed = suspect([None if found is None else Failure(**found) for found in recorded]) or ""
    # The host name may be n1.site and Slurm's name n1.
    return next((node for node in nodes if node in (blamed, blamed.partition(".")[0])), "")
