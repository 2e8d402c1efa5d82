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
from typing import NamedTuple

from hpcdist.config.schema import Config
from hpcdist.config.topology import port_for
from hpcdist.containers.runtimes import CONTAINERS_STEP
from hpcdist.errors import HpcdistError, RunFolderError
from hpcdist.host.json_files import fill, read_json
from hpcdist.job.node_steps import ranks_on_nodes
from hpcdist.job.srun import PREFLIGHT_STEP
from hpcdist.run.checkpoint_files import newest_step
from hpcdist.run.folder import Attempt, RunDir
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
        """The nodes on which steps can run, but which the next attempt does not use."""
        return tuple(node for node in self.present if node not in self.used)

    @property
    def missing(self) -> tuple[str, ...]:
        """The lost nodes with which the run would become larger if they answered again."""
        if len(self.used) >= self._target:
            return ()
        return tuple(node for node in self._allocated if node in self._lost and self._losses[node] < MAX_LOSSES)

    def can_lose(self, nodes: Collection[str]) -> bool:
        """Return whether the run may continue without these nodes."""
        out = self._lost | self._unfit | set(nodes)
        return len(self._allocated) - len(out) >= self._least

    def drop_silent(self, nodes: Collection[str]) -> bool:
        """Continue without nodes that do not answer. Returns whether enough are left; if not, nothing changes."""
        lost = self._lost | set(nodes)
        if not self._replace(lost | self._unfit):
            return False
        for node in set(nodes) - self._lost:
            self._losses[node] = self._losses.get(node, 0) + 1
        self._lost = lost
        return True

    def drop_unfit(self, nodes: Collection[str]) -> bool:
        """Continue without nodes that answer but are not fit for ranks. The result is that of `drop_silent`."""
        if not self._replace(self._lost | self._unfit | set(nodes)):
            return False
        self._unfit |= set(nodes)
        return True

    def restore(self, nodes: Iterable[str]) -> None:
        """Use lost nodes again, which answer and are free of ranks."""
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
        fit = [node for node in self._allocated if node not in out]
        # Nodes of the last attempt come first, so that ranks stay where their files are cached.
        used_first = sorted(fit, key=lambda node: node not in self.used)
        chosen = used_first[: self._target]
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
#: Limit of the connections to all nodes together, which bounds the load of the supervisor's machine.
_CONNECTIONS_PER_S = 200
#: Time limit of a connection. It leaves time for a second one before the node counts as lost.
_CONNECT_S = 1.5
#: A node that has not answered for this time, and for three intervals, is lost.
SILENT_S = 4.0
_SILENT_INTERVALS = 3
#: A node gets this time to answer again if its loss would send the run back into the queue.
_SILENT_BEFORE_REQUEUE_S = 30.0
#: After a pause between two calls of `silent`, as of a suspended process, no more than this counts.
PAUSE_S = 1.0
#: Results of a connection that only the kernel of a living node can give.
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


@dataclass
class _Node:
    """A node and the connection that asks whether it lives. Times are on the monotonic clock."""

    address: str
    connection: socket.socket | None = None
    began: float = 0.0  #: time of the last connection
    answered: float | None = None  #: time of the last answer; None if the node has never answered

    def connect(self, port: int, now: float) -> None:
        """Begin a connection, without waiting for its end."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self.began = now
        self.connection = socket.socket(family, socket.SOCK_STREAM)
        self.connection.setblocking(False)
        code = self.connection.connect_ex((self.address, port))
        if code != errno.EINPROGRESS:
            self.end(code, now)

    def end(self, code: int, now: float) -> None:
        """Close the connection, if there is one; `code` is the error with which it has ended."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if code in _ANSWERS:
            self.answered = now

    def check_connection(self, ready: Collection[int], now: float) -> None:
        """End the connection if it has a result, or if its time is over; `ready` are descriptors with a result."""
        if self.connection is None:
            return
        if self.connection.fileno() in ready:
            self.end(self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), now)
        elif now - self.began > _CONNECT_S:
            self.end(errno.ETIMEDOUT, now)


class HostProbe:
    """Finds the nodes that have answered before and do not answer any more. No threads: `silent` does all the work.

    Nothing has to listen on the port.
    """

    def __init__(self, addresses: Mapping[str, str], port: int) -> None:
        self._nodes = {name: _Node(address) for name, address in addresses.items()}
        self._port = port
        self._every_s = max(PROBE_EVERY_S, len(self._nodes) / _CONNECTIONS_PER_S)
        self._last_call = time.monotonic()

    def silent(self, for_s: float = SILENT_S) -> list[str]:
        """Return the nodes that have not answered for some time. Call it several times a second."""
        now = time.monotonic()
        pause_s = max(0.0, now - self._last_call - PAUSE_S)
        self._last_call = now
        limit_s = max(for_s, _SILENT_INTERVALS * self._every_s)
        poll = select.poll()
        for node in self._nodes.values():
            if node.connection is not None:
                poll.register(node.connection, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll(0)}
        silent = []
        for name, node in self._nodes.items():
            node.check_connection(ready, now)
            if node.connection is None and now - node.began >= self._every_s:
                node.connect(self._port, now)
            if node.answered is not None:
                # No connection was made during the pause.
                node.answered = min(now, node.answered + pause_s)
                if now - node.answered > limit_s:
                    silent.append(name)
        return silent

    def close(self) -> None:
        """Close all connections."""
        for node in self._nodes.values():
            node.end(errno.ECANCELED, 0.0)


def addresses_of(nodes: Iterable[str]) -> dict[str, str]:
    """Return the address of each node; nodes without one are left out."""
    addresses = {}
    for node in nodes:
        with suppress(OSError):
            *_, address = socket.getaddrinfo(node, None, type=socket.SOCK_STREAM)[0]
            addresses[node] = str(address[0])
    return addresses


# A run that goes on in its allocation without failed nodes, and with them when they answer again.
#
# Slurm notices a dead node only after `SlurmdTimeout`. Until then Slurm believes that the processes of a step run on
# that node, so the step does not end. Therefore the ranks are killed without Slurm on each node that answers, the step
# is abandoned, and the next step overlaps it on the other nodes.

log = logging.getLogger(__name__)
#: Interval of checks for a new checkpoint and for lost nodes that answer again.
CHECK_EVERY_S = 5.0


class FixedNodes(NodeChanges):
    """The nodes of a run that does not change them within its allocation."""

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


class _LostNodes(NamedTuple):
    """The result of a check of lost nodes that answer again."""

    fit: Sequence[str] = ()  #: nodes on which ranks can be started
    gone: Sequence[str] = ()  #: nodes that Slurm has taken out of the job
    all_answer: bool = True  #: whether all others have answered


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
        #: The running check of lost nodes.
        self._check: Future[_LostNodes] | None = None
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
        """Continue without nodes that fail the preflight check; return whether enough others are left.

        Nodes that do not answer count as lost, so they may be used again; the others count as unfit.
        """
        if not self.pool.can_lose(blamed):
            return False
        answers = self._kill_ranks(blamed)
        silent = [node for node in blamed if node not in answers]
        if silent:
            # Slurm cannot end the steps that the check has started on them.
            self.pool.drop_silent(silent)
            self.abandoned |= {PREFLIGHT_STEP, NODES_STEP, CONTAINERS_STEP}
        unfit = [node for node in blamed if node in answers]
        if unfit:
            self.pool.drop_unfit(unfit)
        return True

    def detect_lost(self) -> tuple[int, str] | None:
        """Return the first rank on a node that does not answer any more, and the node; None if all answer.

        Nodes without ranks are noted only.
        """
        silent = self._probe.silent()
        self._note_idle(silent)
        lost = [node for node in self.pool.used if node in silent]
        if not lost:
            return None
        if not self.pool.can_lose(lost):
            # The run has to go back into the queue, so a node is given more time to answer. Nodes that were lost long
            # ago are not among `lost`.
            long_silent = self._probe.silent(_SILENT_BEFORE_REQUEUE_S)
            if not set(lost) & set(long_silent):
                return None
        self._lost = tuple(lost)
        first_rank = self.pool.used.index(lost[0]) * self._tasks_per_node
        return first_rank, lost[0]

    def _note_idle(self, silent: Sequence[str]) -> None:
        """Note the nodes without ranks that do not answer any more, and those that answer again."""
        lost = [node for node in silent if node not in self.pool.used and node in self.pool.present]
        if lost:
            self.pool.drop_silent(lost)
            self._lost_idle |= set(lost)
            log.warning("%s: no answer from the node, which runs no ranks", ", ".join(lost))
        back = self._lost_idle - set(silent)
        if back:
            # `end_ranks` finds out whether they still belong to the job.
            self._lost_idle -= back
            self.pool.keep_idle(back)

    def end_ranks(self, step: str) -> bool:
        """Kill the ranks on all nodes that answer, and note the lost nodes; return whether Slurm cannot end the step.

        A step without surviving ranks is abandoned: Slurm may keep it, but it does not matter any more.
        """
        self._note_removed()
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

    def _note_removed(self) -> None:
        """Count the nodes that Slurm has taken out of the job as lost: a step with one of them starts on no node."""
        allocated: tuple[str, ...] = ()
        with suppress(HpcdistError):
            allocated = self._job.allocated()
        if not allocated:
            return  # unknown
        removed = [node for node in self.pool.present if node not in allocated]
        removed_used = [node for node in removed if node in self.pool.used]
        removed_idle = [node for node in removed if node not in self.pool.used]
        # Each node once, in order.
        self._lost = tuple(dict.fromkeys((*self._lost, *removed_used)))
        if removed_idle:
            self.pool.drop_silent(removed_idle)
        self.pool.forget(removed)

    def _kill_ranks(self, nodes: Sequence[str]) -> dict[str, list[int]]:
        """Kill the run's ranks on nodes without Slurm; return those that survive on the nodes that answer."""
        return ranks_on_nodes(self._run, "kill", JobNodes(nodes, chosen=True), self._env, patient=False)

    def replace_lost(self) -> str:
        """Continue without the lost nodes, or without a node on which ranks fail repeatedly.

        Returns a sentence on the change of nodes, or "" if they stay the same.
        """
        lost = self._lost
        before = self.pool.used
        self._lost = ()
        if lost:
            why = "no answer from"
            has_enough = self.pool.drop_silent(lost)
        else:
            blamed = failing_node(self._run, before)
            if not blamed:
                return ""
            why = "ranks have failed twice in a row on"
            lost = (blamed,)
            has_enough = self.pool.drop_unfit(lost)
        if not has_enough:
            return ""
        used = self.pool.used
        changes = []
        new = [node for node in used if node not in before]
        if new:
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
            check = self._check
            self._check = None
            self._note_check(check)
        elif self._check is None and time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + CHECK_EVERY_S
            # Slurm could not end a step on a node that is known to be silent.
            silent = self._probe.silent()
            missing = [node for node in self.pool.missing if node not in silent]
            if missing:
                self._check = self._thread.submit(self._examine, missing, self._step_at_start)
        return ""

    def _note_check(self, check: "Future[_LostNodes]") -> None:
        """Note the result of a check that has ended; the next `detect_returned` returns the fit nodes."""
        try:
            nodes = check.result()
        except (HpcdistError, OSError) as error:
            log.info("the lost nodes cannot be checked: %s", error)
            return
        self._returned = nodes.fit
        self.pool.forget(nodes.gone)
        if nodes.gone:
            log.info("Slurm has taken %s out of the job: the next requeue may replace it", ", ".join(nodes.gone))
        if not nodes.all_answer:
            self.abandoned.add(NODES_STEP)

    def _examine(self, missing: Sequence[str], step_at_start: int | None) -> _LostNodes:
        """Check lost nodes, and kill the ranks of earlier attempts on them; without a new checkpoint do nothing."""
        if newest_step(self._run) == step_at_start:
            return _LostNodes()
        allocated = self._job.allocated()
        remaining = [node for node in missing if node in allocated]
        gone: list[str] = []
        if allocated:
            gone = [node for node in missing if node not in allocated]
        # Ranks of an earlier attempt may have survived there.
        answers = self._kill_ranks(remaining)
        return _LostNodes(
            fit=[node for node in remaining if answers.get(node) == []],
            gone=gone,
            all_answer=answers.keys() == set(remaining),
        )


def _read_failure(attempt: Attempt) -> Failure | None:
    """Return the failure of an attempt; None without one, or if its record is damaged. Unknown keys are ignored."""
    record = read_json(attempt.failure)
    if record is None:
        return None
    lines = record.get("traceback")
    if isinstance(lines, list):
        record["traceback"] = tuple(map(str, lines))
    try:
        return fill(Failure, record, attempt.failure)
    except RunFolderError:
        return None


def failing_node(run: RunDir, nodes: Sequence[str]) -> str:
    """Return the node among `nodes` on which ranks fail repeatedly; "" if there is none."""
    history = []
    for attempt in run.attempts():
        history.append(_read_failure(attempt))
    host = suspect(history)
    if host is None:
        return ""
    # The host name may be n1.site and Slurm's name n1.
    short_name = host.partition(".")[0]
    return next((node for node in nodes if node in (host, short_name)), "")
