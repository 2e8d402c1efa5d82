"""The launcher of ranks on this machine, and the start of a supervised run."""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Self

from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.schema import Config
from hpcdist.config.topology import OWN_PLACE, OWN_RENDEZVOUS
from hpcdist.config.written import secrets_of
from hpcdist.errors import HpcdistError, RunFolderError
from hpcdist.host import retry
from hpcdist.host.commands import run_within
from hpcdist.host.files import write_json
from hpcdist.host.machine import image_facts, num_cores
from hpcdist.rank.parent_client import NoParentError, RankRefusedError
from hpcdist.run import snapshot
from hpcdist.run.folder import IDENTITY_VARIABLE, Attempt, RunDir, State, identity, read_record, require_same
from hpcdist.run.lease import hold
from hpcdist.run.records import NodeShare, Resources
from hpcdist.supervisor.children import ForkedRank, Guard, RankParent
from hpcdist.supervisor.plan import Plan, code_env, free_port, rank_command
from hpcdist.supervisor.progress import Reporter
from hpcdist.supervisor.restart_policy import error_text

log = logging.getLogger(__name__)


def supervise_locally(
    run: RunDir,
    config: Config,
    plan: Plan,
    view: Callable[[], AbstractContextManager[Reporter]],
    env: Mapping[str, str],
    *,
    tracking_uri: str,
) -> State:
    """Hold the run's lease and supervise the run until its end. Returns its last state.

    `view` is called when the parent of the ranks has begun to import torch. Raises RunFolderError if another supervisor
    holds the run, or its folder is incomplete.
    """
    with retry.patient(retry.UNATTENDED_S), hold(run) as held:
        code = snapshot.code_state(run)
        facts = read_record(run.environment) or {}
        if facts | (image := image_facts(env)) != facts:  # first start in this image
            write_json(run.environment, facts | image)
        # The original working directory may not exist on another machine; the run folder holds the code.
        cwd = Path(code.cwd) if Path(code.cwd).is_dir() else run.path
        # Values are redacted in config.yaml; ranks read them from the environment.
        env = {**env, **secrets_of(config), IDENTITY_VARIABLE: identity(run.path)}
        with (
            LocalLauncher(
                run,
                plan,
                env=env,
                import_path=snapshot.import_path(code, run),
                cwd=cwd,
                fork=config.launch.fork and not config.trainer.script,
                init_timeout_s=config.launch.init_timeout_s,
            ) as launcher,
            view() as report,
        ):
            from hpcdist.supervisor.supervisor import Supervisor  # its imports take as long as all before

            supervisor = Supervisor(
                run, config, launcher, report, tracking_uri=tracking_uri, env=env, check_lease=held.check
            )
            return supervisor.run()


def detach(run: RunDir, env: Mapping[str, str]) -> int:
    """Start a supervisor that outlives this process and the terminal, and wait for its first state. Returns its pid.

    Without the wait, a `status` or `follow` that comes next could see the run as before this start.

    Raises RunFolderError if the supervisor ends before that, as when another process has taken the run.
    """
    before, log_file = run.read_state(), run.path / "supervisor.log"
    with open(log_file, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hpcdist", "supervise", str(run.path)],
            env=dict(env),  # the run's secrets are in its folder
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while process.poll() is None and run.read_state() == before:
        time.sleep(0.05)
    if process.poll() and run.read_state() == before:
        raise RunFolderError(f"the supervisor of {run.name} ended before it started the run: see {log_file}")
    return process.pid


@dataclass(eq=False)
class LocalLauncher:
    """Starts ranks on this machine, each in its own process group; owns their process guard and parent."""

    run: RunDir
    plan: Plan
    _: KW_ONLY
    env: Mapping[str, str]  #: of the ranks; variables of the plan take precedence
    import_path: Sequence[str]  #: folders that precede all others in the ranks' import path
    cwd: Path
    fork: bool = False  #: whether a parent process forks the ranks, if it can
    init_timeout_s: float = LaunchConfig.init_timeout_s  #: of the imports of this parent

    def __post_init__(self) -> None:
        self.num_ranks = self.plan.num_ranks
        self._job_id = f"{self.run.experiment}/{self.run.name}"
        python_path = self.plan.env.get("PYTHONPATH") or self.env.get("PYTHONPATH")
        self._code = code_env(self.import_path, python_path)
        self._parent: RankParent | None = None

    def __enter__(self) -> Self:
        self._guard = Guard()
        self._start_parent()
        return self

    def __exit__(self, *_: object) -> None:
        self._close_parent()
        self._guard.close()

    @property
    def resources(self) -> Resources:
        """One GPU for each rank on a GPU; without GPUs, the cores of all threads of the ranks."""
        if gpu_ranks := [rank for rank in range(self.num_ranks) if self.plan.device_of(rank) != "cpu"]:
            own = NodeShare(allocated=len(gpu_ranks), share=1, ranks=gpu_ranks)
            return Resources(unit="GPU", nodes={socket.gethostname(): own})
        cores = min(num_cores(), self.num_ranks * self.plan.threads)
        own = NodeShare(allocated=cores, share=cores / self.num_ranks, ranks=list(range(self.num_ranks)))
        return Resources(nodes={socket.gethostname(): own})

    def broken(self) -> str:
        return ""  # ranks can always be restarted on this machine

    def start(self, attempt: Attempt) -> "LocalRanks":
        if (ended := self._parent) is not None and not (ended.is_usable and ended.is_alive()):
            self._close_parent()
            if ended.is_usable and ended.was_ready:  # a parent that could not fork has no successor
                log.warning("the parent process of the ranks has ended and is started again (see %s)", ended.output)
                self._start_parent()
        return LocalRanks(
            rank_command(self.run.path),
            self._envs(attempt.number, free_port(self._job_id, attempt.number)),
            [attempt.log(rank) for rank in range(self.num_ranks)],
            self._guard,
            cwd=self.cwd,
            parent=self._parent,
        )

    def _envs(self, attempt: int, port: int) -> list[dict[str, str]]:
        topology: dict[str, Any] = {"job_id": self._job_id, "attempt": attempt, "master_port": port}
        envs = (self.plan.rank_env(rank, **topology) for rank in range(self.num_ranks))
        return [{**self.env, **env, **self._code} for env in envs]

    def _start_parent(self) -> None:
        """Start the parent process of the ranks, unless their environments differ in more than their topology."""
        topology = {*OWN_PLACE, *OWN_RENDEZVOUS}
        envs = [{name: env[name] for name in env.keys() - topology} for env in self._envs(0, 1)]
        # Libraries read variables such as OMP_NUM_THREADS at their import, glibc reads MALLOC_ variables before that.
        if not self.fork or any(env != envs[0] for env in envs):
            return
        try:
            self._parent = RankParent(
                self.run.path,
                self._guard,
                env=envs[0],
                cwd=self.cwd,
                output=self.run.path / "attempts" / "rank-parent.log",
                init_timeout_s=self.init_timeout_s,
            )
        except OSError as error:  # ranks can do without it
            log.warning("each rank imports torch itself, since their parent process cannot be started: %s", error)

    def _close_parent(self) -> None:
        if self._parent is not None:
            self._parent.close()
            self._parent = None


@dataclass(eq=False)
class LocalRanks:
    """The ranks of one attempt, forked as soon as their parent has imported torch, perhaps in a later call of `wait`.

    If the parent cannot fork, they are started by their command.
    """

    command: Sequence[str]
    envs: Sequence[Mapping[str, str]]  #: complete environments, by rank
    logs: Sequence[Path]  #: files for standard output and error, by rank
    guard: Guard
    cwd: Path
    parent: RankParent | None = None

    def __post_init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes] | ForkedRank]
        self._descriptors: list[int] = []
        self._error = ""
        self.exits: dict[int, int]
        self._start()

    @property
    def remaining(self) -> list[int]:
        return [rank for rank in range(len(self.envs)) if rank not in self.exits]

    def host_of(self, rank: int) -> str:
        return socket.gethostname()

    def wait(self, timeout_s: float) -> None:
        if self.parent is not None and not self._processes and self.remaining:
            try:
                retry.retry(lambda: self._start(timeout_s), self.logs[0].parent)
            except (HpcdistError, OSError) as error:  # there is nothing to return it to: all ranks count as ended
                self._error = error_text(error)
                self._processes = []
                self.exits = dict.fromkeys(range(len(self.envs)), 1)
            return
        poll = select.poll()
        for rank in self.remaining:
            poll.register(self._descriptors[rank], select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(timeout_s * 1000)}
        for rank in self.remaining:
            if self._descriptors[rank] in ended and (code := self._processes[rank].poll()) is not None:
                self.exits[rank] = code

    def absent(self) -> list[int]:
        return list(range(len(self.envs))) if self._error else []

    def last_message(self) -> str:
        return self._error

    def signal(self, number: signal.Signals) -> None:
        if not self._processes and number == signal.SIGTERM:
            self.exits = dict.fromkeys(range(len(self.envs)), -number)  # as if they had been starting
        for rank in self.remaining if self._processes else ():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptors[rank], number)

    def examine(self, command: Sequence[str], *, limit_s: float, interrupted: Callable[[], bool]) -> str:
        done = run_within(command, limit_s, is_enough=lambda _: interrupted())
        return done.stdout + done.stderr

    def close(self) -> None:
        self._kill_groups()
        if self.parent is not None and not self.parent.was_ready:
            self.parent.is_usable = False  # the next attempt does not wait for it again
        for rank in self.remaining:  # never started
            self.exits[rank] = -signal.SIGKILL
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _start(self, timeout_s: float = 0.0) -> None:
        """Start the ranks, unless their parent is still importing after `timeout_s`."""
        self._processes, self.exits = [], {}
        try:
            if self.parent is not None and not self.parent.is_ready(timeout_s):
                return
            # Checked before the start, because an interpreter imports from the run folder at once.
            require_same(self.logs[0].parents[2], self.envs[0])
            for env, path in zip(self.envs, self.logs, strict=True):
                if self.parent is None:
                    self._processes.append(self.guard.start(self.command, env=env, cwd=self.cwd, output=path))
                else:
                    with open(path, "ab") as file:
                        self._processes.append(self.parent.fork(env, file.fileno()))
            self._descriptors = [os.pidfd_open(process.pid) for process in self._processes]
        except NoParentError as error:
            assert self.parent is not None, "only a parent can end"
            log.warning("each rank imports torch itself: %s (see %s)", error, self.parent.output)
            self.parent.is_usable = False
            self._kill_groups()
            self.parent = None
            self._start()
        except RankRefusedError as error:
            self._kill_groups()
            raise HpcdistError(str(error)) from error
        except BaseException:
            self._kill_groups()
            raise

    def _kill_groups(self) -> None:
        for rank, process in enumerate(self._processes):
            with suppress(ProcessLookupError):
                # A group outlives its leader as long as a grandchild is alive.
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            code = process.wait()
            self.exits.setdefault(rank, code)
            self.guard.forget(process.pid)
