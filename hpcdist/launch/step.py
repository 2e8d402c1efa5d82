"""Ranks as the tasks of one srun step, inside an allocation that exists already."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcdist.cluster.nodelist import expand
from hpcdist.errors import HpcdistError
from hpcdist.launch.components import components, hosts_by_rank, is_het, place
from hpcdist.launch.container import Box, outer_env
from hpcdist.launch.container_steps import ContainerSteps
from hpcdist.launch.guard import Guard
from hpcdist.launch.job import Job, job_ids, node_features
from hpcdist.launch.plan import code_env, rank_command
from hpcdist.launch.policy import Failure, suspect
from hpcdist.launch.srun import STEP_NAMES, roll_call_command, standby_command, step_command, step_name
from hpcdist.rundir import Attempt, RunDir, read_json
from hpcdist.schema import Config

#: `srun: error: n2: tasks 2-3: Killed`, `srun: error: n1: task 0: Exited with exit code 1`
_TASK_ENDED = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<ranks>[\d,\-]+): (?P<how>.+)")
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_SIGNALS = {
    "Killed": signal.SIGKILL,
    "Out Of Memory": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
}
#: A node that does not answer a step in this time is taken for lost. Slurm's own messages time out after 10 s.
ROLL_CALL_S = 20.0
#: A search through the attempt's folder is followed by a pause of so many times what it took.
SEARCH_PAUSE = 50.0
#: No file system's time stamps are coarser.
FOLDER_TICK_S = 2.0
#: Ranks that were killed end at once, unless their node or its disk hangs.
OLD_STEPS_S = 60.0


def ended_tasks(messages: str, first_ranks: Mapping[str, int] | None = None) -> dict[int, tuple[str, int]]:
    """Host and exit code (negative: signal) of every task that srun reports as ended badly, in its order.

    Args:
        first_ranks: first rank of the component that a host belongs to; srun counts a component's tasks from 0.
    """
    found: dict[int, tuple[str, int]] = {}
    for match in _TASK_ENDED.finditer(messages):
        how = match["how"].strip()
        code = _EXIT_CODE.match(how)
        number = next((value for name, value in _SIGNALS.items() if how.startswith(name)), None)
        value = int(code[1]) if code else -number if number is not None else 1
        for task in expand(f"t[{match['ranks']}]"):
            rank = int(task[1:]) + (first_ranks or {}).get(match["host"], 0)
            found.setdefault(rank, (match["host"], value))
    return found


class StepRanks:
    """The ranks of one attempt, as one srun process.

    A look at them costs two system calls as long as nothing happens: srun's messages are read on from where they
    ended, and outcome files are looked for when the attempt's folder has changed.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        num_ranks: int,
        attempt: Attempt,
        guard: Guard,
        *,
        cwd: Path,
        hosts: Sequence[str] = (),
        first_ranks: Mapping[str, int] | None = None,
        containers: ContainerSteps | None = None,
    ) -> None:
        self._planned_hosts = hosts
        self._first_ranks = first_ranks
        self._num_ranks = num_ranks
        self._attempt = attempt
        self._containers = containers
        self._guard = guard
        self.exits: dict[int, int] = {}
        self._running = list(range(num_ranks))
        self._hosts: dict[int, str] = {}
        self._unread = b""
        self._folder_time: int | None = None
        self._changed_at = 0.0
        self._search_again = True
        self._next_search = 0.0
        self._reported: set[int] = set()
        self._process = guard.start(command, env=env, cwd=cwd, output=attempt.path / "srun.log")
        self._descriptor = os.pidfd_open(self._process.pid)
        self._log = open(attempt.path / "srun.log", "rb")  # noqa: SIM115  # closed with the step

    @property
    def running(self) -> list[int]:
        if len(self._running) != self._num_ranks - len(self.exits):
            self._running = [rank for rank in range(self._num_ranks) if rank not in self.exits]
        return self._running

    def host_of(self, rank: int) -> str:
        """What srun or the rank itself said of it; before that where it was placed, or only the allocation."""
        planned = self._planned_hosts[rank] if self._planned_hosts else os.environ["SLURM_JOB_NODELIST"]
        beat = read_json(self._attempt.beat(rank)) or {}
        return str(self._hosts.get(rank) or beat.get("host") or planned)

    def wait(self, timeout_s: float) -> None:
        """Return when the step has ended or the time is over.

        srun goes on waiting for the tasks of a dead node, so what it and the ranks have said so far counts as well.
        """
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        ended = bool(poll.poll(timeout_s * 1000))
        self._read_messages(to_the_end=ended)
        self._find_failures(in_any_case=ended)
        if ended:
            code = self._process.wait()
            if code != 0 and not any(self.exits.values()):
                self.exits.setdefault(0, code)
            for rank in self.running:
                self.exits[rank] = 0

    def _read_messages(self, *, to_the_end: bool) -> None:
        """Count what srun has said since the last time, whole lines alone."""
        self._unread += self._log.read()
        end = len(self._unread) if to_the_end else self._unread.rfind(b"\n") + 1
        news, self._unread = self._unread[:end], self._unread[end:]
        for rank, (host, code) in ended_tasks(news.decode(errors="replace"), self._first_ranks).items():
            self._hosts.setdefault(rank, host)
            if self._containers is not None and rank not in self.exits:
                code = self._containers.meaning(self._attempt, rank, host, code)
            self.exits.setdefault(rank, code)

    def _find_failures(self, *, in_any_case: bool) -> None:
        """Count ranks that have reported a failure; each report is read once."""
        began = time.monotonic()
        changed = os.stat(self._attempt.path).st_mtime_ns
        if changed != self._folder_time:
            self._folder_time, self._changed_at, self._search_again = changed, began, True
        if not in_any_case and (not self._search_again or began < self._next_search):
            return
        # What changes the folder in the same tick of its clock as the last change is not seen in its time.
        self._search_again = began < self._changed_at + FOLDER_TICK_S
        outcomes = self._attempt.outcomes(besides=self._reported)
        self._reported |= outcomes.keys()
        for rank, outcome in sorted(outcomes.items(), key=lambda item: float(item[1]["time"])):
            if outcome["outcome"] in ("failed", "rejected"):
                self.exits.setdefault(rank, 2 if outcome["outcome"] == "rejected" else 1)
        # While thousands of ranks make their files the folder changes all the time.
        now = time.monotonic()
        self._next_search = now + SEARCH_PAUSE * (now - began)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every task that still runs."""
        self._scancel(f"--signal={number.name.removeprefix('SIG')}")

    def close(self) -> None:
        """End the step on every node that answers, and srun with it."""
        if self._process.poll() is None:
            # Killing srun alone would leave its tasks running.
            self._scancel("--signal=KILL")
            try:
                self._process.wait(ROLL_CALL_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        if self._containers is not None:
            self._containers.remove_left()
        self._guard.forget(self._process.pid)
        self._log.close()
        os.close(self._descriptor)

    def _scancel(self, *flags: str) -> None:
        for step, name in (steps() or {}).items():
            if name == step_name(self._attempt):
                # One that has just ended is an error to scancel.
                subprocess.run(["scancel", *flags, step], stderr=subprocess.DEVNULL, check=False)


def steps() -> dict[str, str] | None:
    """This job's steps that have not ended: names by id. None when Slurm does not answer."""
    # A step over several components is one step in each of them.
    jobs = ",".join(job_ids(os.environ))
    listing = subprocess.run(
        ["squeue", "--steps", f"--jobs={jobs}", "--noheader", "--format=%i %j"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        return None
    return dict(line.strip().partition(" ")[::2] for line in listing.stdout.splitlines())


def end_old_steps() -> None:
    """End the ranks of a supervisor of this job that was killed: Slurm lets them go on without their srun.

    Raises HpcdistError when one does not end, or nobody can tell: two sets of ranks must never write to one run.
    """
    until = time.monotonic() + OLD_STEPS_S
    while (found := steps()) is None or (old := [step for step, name in found.items() if name.startswith(STEP_NAMES)]):
        if time.monotonic() > until:
            what = "squeue does not answer: are there" if found is None else f"step {old[0]} does not end: it has"
            raise HpcdistError(f"{what} ranks of a supervisor before this one")
        if found:
            subprocess.run(["scancel", "--signal=KILL", *old], check=False)
        time.sleep(0.2)  # Slurm tells nobody when a step has ended


class StepLauncher:
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
        job: Job,
        *,
        env: Mapping[str, str],
        import_path: Sequence[str],
        cwd: Path,
        box: Box | None = None,
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

    def __enter__(self) -> StepLauncher:
        end_old_steps()
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

    def start(self, attempt: Attempt) -> StepRanks:
        """Start every rank. Raises HpcdistError where containers cannot be started on the nodes."""
        if self._containers is not None:
            self._containers.prepare()
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
        return StepRanks(
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
        )

    def broken(self) -> str:
        """Call the roll: a sentence about nodes that do not answer any more, or that fail while others do not.

        `avoid` then has those of them that the partition can do without.
        """
        nodes = [node for own in self.nodes for node in own]
        answers = self._roll_call()
        if lost := [node for node in nodes if node not in answers]:
            # Without an idle node in its place the job is better off waiting for this one to come back.
            self.avoid = lost if self._replaceable(lost, idle_only=True) else []
            return f"lost {', '.join(lost)}" + (", avoided from now on" if self.avoid else "")
        blamed = suspect([failure_of(attempt) for attempt in self._run.attempts()]) or ""
        # A host may call itself n1.site where Slurm says n1.
        named = [node for node in nodes if node in (blamed, blamed.partition(".")[0])]
        self.avoid = named if named and self._replaceable(named, idle_only=False) else []
        if not self.avoid:
            return ""
        return f"ranks on {blamed} have failed twice in a row, and on no other node: avoided from now on"

    def _replaceable(self, nodes: Sequence[str], *, idle_only: bool) -> bool:
        # A heterogeneous job has a list of nodes to avoid for each component, and Slurm tells of the leader's alone.
        return not self._het and self._job.replaceable(nodes, idle_only=idle_only)

    def _roll_call(self) -> set[str]:
        try:
            answer = subprocess.run(
                roll_call_command(self.nodes, het=self._het),
                capture_output=True,
                text=True,
                env=self._env,
                timeout=ROLL_CALL_S,
                check=False,
            ).stdout
        except subprocess.TimeoutExpired as late:
            answer = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return set(answer.split())


def nodes_of(config: Config, env: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Names of each component's nodes, in the job whose environment this is."""
    parts = components(config)
    if is_het(config):
        return [tuple(expand(env[f"SLURM_JOB_NODELIST_HET_GROUP_{index}"])) for index in range(len(parts))]
    nodes = expand(env["SLURM_JOB_NODELIST"])
    if len(parts) == 1:
        return [tuple(nodes)]
    wants_features = len({part.constraint for part in parts}) > 1
    return place(parts, nodes, node_features(nodes) if wants_features else {})


def failure_of(attempt: Attempt) -> Failure | None:
    """What the supervisor wrote down of an attempt that failed."""
    found = read_json(attempt.failure)
    return None if found is None else Failure(**found)
