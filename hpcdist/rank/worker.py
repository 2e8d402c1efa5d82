"""One rank, from its environment to its exit code.

    0  done, or stopped with everything saved
    1  failed: a restart may help
    2  rejected: the user's mistake, no restart helps

A rank says how it ended in `attempts/NNN/rank-RRRRR.outcome.json`: rank 0 alone when all is well, any rank when it
fails. One that is killed says nothing, and the supervisor notices.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from hpcdist import logs
from hpcdist.config.loading import load_run_config
from hpcdist.config.schema import Config, role_device
from hpcdist.errors import HpcdistError, PeerLost, RemoteError, RendezvousError, TrainerError, UserMistake
from hpcdist.files import retry
from hpcdist.files.atomic import write_json
from hpcdist.files.log_limit import limit_log
from hpcdist.rank.roles import Roles
from hpcdist.rank.script import run_script
from hpcdist.rank.stop_signals import StopFlag
from hpcdist.rank.telemetry.flight_recorder import record_collectives, tell_on_signal
from hpcdist.rank.topology import Topology
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir
from hpcdist.run.polling import system_interval_s

if TYPE_CHECKING:
    import torch

    from hpcdist.rank.network.process_group import Groups

#: By its name, since this module runs as `__main__`, whose lines below WARNING are not shown.
log = logging.getLogger("hpcdist.rank.worker")
#: In messages of gloo, NCCL, TensorPipe and the store: this rank failed because another one has gone.
_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "NCCL",
    "tensorpipe",
)
_RESERVE_BYTES = 16 * 1024
#: How long a rank waits for its files. Peers wait for it meanwhile.
FILES_WITHIN_S = 120.0
#: Of an exception's text and of its traceback in the outcome, from both ends; the log has all of it.
_MAX_TEXT = 10_000


class Outcome:
    """Writes this rank's outcome file, once."""

    def __init__(self, attempt: Attempt, rank: int) -> None:
        self._path = attempt.outcome(rank)
        self._rank = rank
        self.step: Callable[[], int | None] = lambda: None
        # Given back before the report is written: a rank that fails on a full disk can still say so.
        self._reserve = attempt.path / f".rank-{rank:05d}.reserve"
        with suppress(OSError):  # full already: then the report must find room by itself
            self._reserve.write_bytes(bytes(_RESERVE_BYTES))

    def write(self, outcome: Literal["done", "stopped", "failed", "rejected"], **details: Any) -> None:
        self.close()
        write_json(
            self._path,
            {
                "outcome": outcome,
                "rank": self._rank,
                "host": socket.gethostname(),
                "time": time.time(),
                "step": self.step(),
                **details,
            },
        )

    def close(self) -> None:
        """Nothing more to report."""
        retry.discard(self._reserve)

    def write_error(self, error: BaseException) -> int:
        """Report an exception and return the exit code that goes with it."""
        error = RemoteError.received(error) or error
        rejected = isinstance(error, UserMistake)
        text = str(error) or type(error).__name__
        is_ours = isinstance(error, HpcdistError)
        if is_ours:
            log.error("%s", text)
        else:
            log.error("%s", "".join(traceback.format_exception(error)).rstrip())
        self.write(
            "rejected" if rejected else "failed",
            error=_abridged(text if is_ours else f"{type(error).__name__}: {text}"),
            peer_lost=isinstance(error, PeerLost)
            or (isinstance(error, RuntimeError) and any(mark in text for mark in _PEER_LOST)),
            traceback=[] if is_ours else [_abridged("".join(traceback.format_exception(error)))],
        )
        return 2 if rejected else 1


def _abridged(text: str) -> str:
    """Return a text without its middle where it is too long for what reads it: supervisor, commands and MLflow."""
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters, see the log …\n{text[-half:]}"


def main(argv: list[str] | None = None) -> NoReturn:
    """Run one rank of the run folder named in `argv`; never returns."""
    (folder,) = sys.argv[1:] if argv is None else argv
    with retry.patient(FILES_WITHIN_S):
        _run(Path(folder))


def _run(folder: Path) -> NoReturn:
    # A mistake found before the rank is known is printed: there is no outcome file to write yet.
    try:
        topology = Topology.from_env(os.environ)
        logs.configure(rank=topology.rank)
        run = RunDir.open(folder)
    except (HpcdistError, OSError) as error:
        print(f"hpcdist worker: {error}", file=sys.stderr, flush=True)
        _leave(error.exit_code if isinstance(error, HpcdistError) else 1)
    attempt = run.attempt(topology.attempt)
    outcome = Outcome(attempt, topology.rank)
    try:
        _leave(_work(run, attempt, topology, outcome))
    except Exception as error:
        _leave(outcome.write_error(error))


def _work(run: RunDir, attempt: Attempt, topology: Topology, outcome: Outcome) -> int:
    # `kill -USR1` prints the stacks of all threads, which is what one wants to see of a rank that hangs.
    tell_on_signal(attempt, topology.rank, topology.world_size)
    record_collectives(attempt, os.environ)
    config = load_run_config(run.effective_config, [], {"HPCDIST_TRACKING_URI": "", **os.environ})
    limit_log(run.path, config.launch.log_max_mb)
    if config.trainer.script:
        run_script(config.trainer.script, run, topology)
        ended: Literal["done", "stopped"] = "stopped" if retry.exists(attempt.request) else "done"
        reason = f"{Path(config.trainer.script[0]).name} ended with exit status 0"
    else:
        ended, reason = _train(config, run, attempt, topology, outcome)
    if topology.rank == 0:
        outcome.write(ended, reason=reason)
    outcome.close()
    return 0


def _train(
    config: Config, run: RunDir, attempt: Attempt, topology: Topology, outcome: Outcome
) -> tuple[Literal["done", "stopped"], str]:
    """Set everything up around the trainer and run it; returns how it ended, and why."""
    # Before torch, whose import takes a second in which a signal may come.
    flag = StopFlag()
    flag.install()

    _settle_environment(config, topology)
    # What imports make stays for ever: looking for garbage in it meanwhile takes a sixth of torch's import.
    gc.disable()
    from hpcdist.rank.context import Context, seed_everything
    from hpcdist.rank.device import place
    from hpcdist.rank.stop_agreement import StopAgreement
    from hpcdist.rank.telemetry.heartbeat import Heartbeat
    from hpcdist.rank.telemetry.system_metrics import NodeMonitor
    from hpcdist.tracking.journal import JournalWriter

    heartbeat = Heartbeat(attempt, topology.rank, topology.world_size, config.launch.hang_timeout_s)
    outcome.step = lambda: heartbeat.step
    train = load_trainer(config.trainer.target)
    gc.freeze()  # nor is it looked at while training
    gc.enable()
    device, backend = place(config, topology, os.environ)
    seed_everything(config.seed)
    system_s = system_interval_s(config.tracking.system_interval_s, topology.num_nodes)
    with (
        _met(config, attempt, topology, device, backend, outcome) as groups,
        JournalWriter(run.journal, attempt=attempt.number, rank=topology.rank) as journal,
        NodeMonitor(
            journal,
            interval_s=system_s if topology.local_rank == 0 else 0.0,
            began=run.read_state().created,
            node=socket.gethostname() if topology.num_nodes > 1 else None,
            disk=str(run.path),
        ),
    ):
        ctx = Context(
            config=config,
            run=run,
            attempt=attempt,
            topology=topology,
            device=device,
            groups=groups,
            stop=StopAgreement(groups.control, flag, attempt.request, watch_request=topology.rank == 0),
            journal=journal,
            heartbeat=heartbeat,
        )
        train(ctx, config)
        ctx.close()
    return "stopped" if ctx.stop_agreed else "done", ctx.end_reason


@contextmanager
def _met(
    config: Config, attempt: Attempt, topology: Topology, device: torch.device, backend: str, outcome: Outcome
) -> Iterator[Groups]:
    """The ranks' groups, once all ranks are there and, on several nodes, have checked that they add up right."""
    from hpcdist.rank.network.process_group import process_groups

    limit_s = config.launch.init_timeout_s
    preflight = config.preflight.mode if topology.num_nodes > 1 else "off"
    if preflight != "off" and backend == "nccl":
        from hpcdist.rank.telemetry.nccl_log import log_env

        os.environ.update(log_env(topology, attempt, os.environ))
    late = RendezvousError(
        f"rank {topology.rank} did not meet the others at {topology.master_addr}:{topology.master_port} within"
        f" launch.init_timeout_s={limit_s:g} s: does another program listen there?"
    )
    with process_groups(
        topology,
        device,
        backend,
        attempt.read_key(),
        attempt.path,
        init_timeout_s=limit_s,
        # Longer than the supervisor waits: it finds the rank that hangs, not those that wait for it.
        timeout_s=config.launch.hang_timeout_s + 60,
        on_expiry=lambda: _leave(outcome.write_error(late)),
    ) as groups:
        if preflight != "off":
            from hpcdist.rank.collective_check import EFFORTS, check

            check(
                preflight,
                topology,
                device,
                backend,
                groups,
                attempt,
                timeout_s=limit_s + 10 * EFFORTS[preflight].budget_s,
                on_expiry=lambda error: _leave(outcome.write_error(error)),
            )
        yield groups


def _settle_environment(config: Config, topology: Topology) -> None:
    """Variables that depend on which rank this is; torch, gloo and NCCL read them when they are imported or set up."""
    roles = Roles.of(config.roles, topology.world_size)
    role, _ = roles.of_rank(topology.rank)
    log.info("this is %s of %s", roles.name_of(topology.rank), roles)
    if role_device(config, role) == "cpu" and config.launch.device != "cpu":
        # RPC would set up all GPUs in sight, also in ranks that compute on none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if topology.launcher == "slurm":
        from hpcdist.rank.network import network_interface

        os.environ.update(network_interface.interface_env(topology.master_addr, os.environ))


def load_trainer(target: str) -> Callable[[Any, Config], None]:
    """The function that `trainer.target` names: a shipped trainer, or `package.module:function`.

    Raises TrainerError when it cannot be imported or is no function.
    """
    module_name, colon, function_name = target.partition(":")
    if not colon:
        module_name, function_name = f"hpcdist.trainers.{target}.train", "train"
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise TrainerError(f"trainer {target!r} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise TrainerError(f"trainer {target!r}: {module.__file__} has no function {function_name!r}")
    return cast(Callable[[Any, Config], None], function)


def _leave(code: int) -> NoReturn:
    """End now. Threads of a library, or peers that have died, must not hold up a rank that has said all."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main()
