"""The launcher of ranks on this machine, and the start of a supervised run."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Self

from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.schema import Config
from hpcdist.config.topology import OWN_PLACE, OWN_RENDEZVOUS
from hpcdist.config.written import secrets_of
from hpcdist.errors import RunFolderError
from hpcdist.host import retry
from hpcdist.host.image_identity import image_facts
from hpcdist.host.json_files import write_json
from hpcdist.host.machine import num_cores
from hpcdist.host.time_limits import run_within
from hpcdist.run import snapshot
from hpcdist.run.attempt_times import NodeShare, Resources
from hpcdist.run.folder import IDENTITY_VARIABLE, Attempt, RunDir, State, identity, read_record, require_same
from hpcdist.run.lease import hold
from hpcdist.supervisor.children import Guard
from hpcdist.supervisor.parents import ParentRanks, RankParents
from hpcdist.supervisor.plan import Plan, code_env, free_port, parent_command, rank_command
from hpcdist.supervisor.progress import Reporter

log = logging.getLogger(__name__)
#: Interval of looks at the state of a run while its supervisor starts.
_POLL_S = 0.05


def supervise_locally(
    run: RunDir,
    config: Config,
    plan: Plan,
    view: Callable[[], AbstractContextManager[Reporter]],
    env: Mapping[str, str],
    *,
    tracking_uri: str,
    launcher: "LocalLauncher | None" = None,
) -> State:
    """Hold the run's lease and supervise the run until its end. Returns its last state.

    Args:
        view: is called when the parent of the ranks has begun to import torch.
        launcher: of this run, if the parent of its ranks was started ahead.

    Raises RunFolderError if another supervisor holds the run, or its folder is incomplete.
    """
    with retry.patient(retry.UNATTENDED_S), hold(run) as held:
        facts = read_record(run.environment) or {}
        with_image = facts | image_facts(env)
        if with_image != facts:  # first start in this image
            write_json(run.environment, with_image)
        try:
            with launcher or LocalLauncher.of(run, config, plan, env) as launcher, view() as report:
                from hpcdist.supervisor.supervisor import Supervisor  # its imports take as long as all before

                supervisor = Supervisor(
                    run, config, launcher, report, tracking_uri=tracking_uri, env=launcher.env, check_lease=held.check
                )
                return supervisor.run()
        except OSError as error:
            # Before any attempt, for example if this user may start no more processes.
            if run.read_state().attempt:
                raise
            return held.fail_start(error)


def detach(run: RunDir, env: Mapping[str, str]) -> int:
    """Start a supervisor that outlives this process and the terminal, and wait for its first state. Returns its pid.

    Without the wait, a `status` or `follow` that comes next could see the run as before this start.

    Raises RunFolderError if the supervisor ends before that, as when another process has taken the run.
    """
    before = run.read_state()
    log_file = run.path / "supervisor.log"
    with open(log_file, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hpcdist", "supervise", str(run.path)],
            env=dict(env),  # the run's secrets are in its folder
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while process.poll() is None and run.read_state() == before:
        time.sleep(_POLL_S)
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
    fork: bool = False  #: whether the parent process imports torch for the ranks and forks them, if it can
    init_timeout_s: float = LaunchConfig.init_timeout_s  #: of the imports of this parent

    @classmethod
    def of(cls, run: RunDir, config: Config, plan: Plan, env: Mapping[str, str]) -> Self:
        """Return the launcher of a run. Raises RunFolderError if the run's folder is incomplete."""
        code = snapshot.code_state(run)
        cwd = Path(code.cwd)
        if not cwd.is_dir():
            # This is another machine. The run folder holds the code.
            cwd = run.path
        return cls(
            run,
            plan,
            # Values are redacted in config.yaml; ranks read them from the environment.
            env={**env, **secrets_of(config), IDENTITY_VARIABLE: identity(run.path)},
            import_path=snapshot.import_path(code, run),
            cwd=cwd,
            fork=config.launch.fork and not config.trainer.script,
            init_timeout_s=config.launch.init_timeout_s,
        )

    def __post_init__(self) -> None:
        self.num_ranks = self.plan.num_ranks
        self._job_id = f"{self.run.experiment}/{self.run.name}"
        python_path = self.plan.env.get("PYTHONPATH") or self.env.get("PYTHONPATH")
        self._code = code_env(self.import_path, python_path)
        envs = self._envs(0, 1)
        #: Variables that all ranks have, and so their parent.
        self._shared = {name: value for name, value in envs[0].items() if all(env.get(name) == value for env in envs)}
        self._is_started = False

    def start_parent(self) -> None:
        """Start the parent of the ranks and its guard, unless this was done ahead of the run."""
        if self._is_started:
            return
        self._guard = Guard()
        try:
            self._parent = self._new_parent()
        except BaseException:
            self._guard.close()
            raise
        self._is_started = True

    def close(self) -> None:
        """End the parent of the ranks and its guard, if they were started."""
        if self._is_started:
            self._is_started = False
            self._parent.close()
            self._guard.close()

    def __enter__(self) -> Self:
        self.start_parent()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def resources(self) -> Resources:
        """One GPU for each rank on a GPU; without GPUs, the cores of all threads of the ranks."""
        host = socket.gethostname()
        ranks = list(range(self.num_ranks))
        gpu_ranks = [rank for rank in ranks if self.plan.device_of(rank) != "cpu"]
        if gpu_ranks:
            gpu_share = NodeShare(allocated=len(gpu_ranks), share=1, ranks=gpu_ranks)
            return Resources(unit="GPU", nodes={host: gpu_share})
        cores = min(num_cores(), self.num_ranks * self.plan.threads)
        core_share = NodeShare(allocated=cores, share=cores / self.num_ranks, ranks=ranks)
        return Resources(nodes={host: core_share})

    def broken(self) -> str:
        """Return "", because ranks can always be restarted on this machine."""
        return ""

    def start(self, attempt: Attempt) -> "LocalRanks":
        """Start the ranks of an attempt; starts their parent again if the last attempt has left it unusable."""
        if not (self._parent.is_alive() and self._parent.is_usable):
            log.warning("the parent process of the ranks is started again (see %s)", self._parent.output)
            self._parent.close()
            self._parent = self._new_parent()
        # Before the start, because an interpreter imports from the run folder at once.
        require_same(self.run.path, self.env)
        port = free_port(self._job_id, attempt.number)
        starts = []
        for env in self._envs(attempt.number, port):
            starts.append({name: value for name, value in env.items() if value != self._shared.get(name)})
        return LocalRanks(self._parent, attempt, starts, self._guard)

    def _envs(self, attempt: int, port: int) -> list[dict[str, str]]:
        """Return the whole environment of each rank."""
        envs = []
        for rank in range(self.num_ranks):
            rank_env = self.plan.rank_env(rank, job_id=self._job_id, attempt=attempt, master_port=port)
            envs.append({**self.env, **rank_env, **self._code})
        return envs

    def _new_parent(self) -> RankParents:
        rank = rank_command(self.run.path)
        fork = self.fork and self._can_fork()
        command = parent_command(self.run.path, "all", rank, fork=fork, limit_s=self.init_timeout_s)
        output = self.run.path / "attempts" / "rank-parent.log"
        return retry.retry(
            lambda: RankParents(command, self._guard, env=self._shared, cwd=self.cwd, output=output), output
        )

    def _can_fork(self) -> bool:
        """Return whether the ranks differ only in variables that define their place and their rendezvous.

        Libraries read variables such as OMP_NUM_THREADS at their import, and glibc reads MALLOC_ variables before that.
        """
        topology = {*OWN_PLACE, *OWN_RENDEZVOUS}
        envs = [{name: value for name, value in env.items() if name not in topology} for env in self._envs(0, 1)]
        return all(env == envs[0] for env in envs)


class LocalRanks(ParentRanks):
    """The ranks of one attempt on this machine.

    Args:
        envs: variables that the parent does not have, by rank.
        guard: ends the process groups of the ranks, which outlive them, if this process dies.
    """

    def __init__(self, parent: RankParents, attempt: Attempt, envs: Sequence[Mapping[str, str]], guard: Guard) -> None:
        self._guard = guard
        super().__init__(parent, attempt, len(envs), env={}, starts=envs)

    def host_of(self, rank: int) -> str:
        return socket.gethostname()

    def examine(self, command: Sequence[str], *, limit_s: float, interrupted: Callable[[], bool]) -> str:
        done = run_within(command, limit_s, is_enough=lambda _: interrupted())
        return done.stdout + done.stderr

    def close(self) -> None:
        super().close()
        if not self.parents.is_usable:
            self.parents.kill()
        for group in self._pids.values():
            if not self.parents.is_alive():
                # The kernel has killed the ranks, but not their children.
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            self._guard.forget(group)
        self.remove_sockets()

    def _note_start(self, pid: int) -> None:
        self._guard.register(pid)

    def _note_end_of_parents(self) -> None:
        self._error = f"their parent process has ended (see {self.parents.output})"
        for rank in self.remaining:
            if rank in self._pids:
                self.exits[rank] = -signal.SIGKILL
            else:
                # A rank that had not started counts as failed by itself.
                self.exits[rank] = 1
