"""The process of one rank, `python -m hpcdist.rank.worker RUN_FOLDER`.

Exit codes:

    0  the training is done, or was stopped after a checkpoint
    1  failed; a restart may succeed
    2  rejected because of an error of the user, such as an invalid config; a restart cannot succeed
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import logging
import os
import resource
import runpy
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, cast

from hpcdist.config.loading import load_run_config
from hpcdist.config.schema import Config, role_device
from hpcdist.config.topology import Roles, Topology
from hpcdist.config.written import arguments_of
from hpcdist.errors import HpcdistError, RendezvousError, TrainerError
from hpcdist.host import log_files, retry
from hpcdist.host.log_files import limit_log
from hpcdist.host.machine import cache_environment
from hpcdist.rank import outcome as rank_outcome
from hpcdist.rank import script_api
from hpcdist.rank.outcome import Outcome
from hpcdist.rank.processes import StopFlag
from hpcdist.rank.telemetry import dump_on_signal, enable_flight_recorders
from hpcdist.run.folder import Attempt, RunDir, require_same
from hpcdist.run.status import system_interval_s
from hpcdist.tracking.rank_records import URI_VARIABLE, RankRecords, begin, is_declared

if TYPE_CHECKING:
    import torch

    from hpcdist.rank.process_group import Groups
    from hpcdist.rank.system_metrics import NodeMonitor

#: Named explicitly because this module runs as `__main__`, and only loggers of hpcdist are configured.
log = logging.getLogger("hpcdist.rank.worker")
#: How long a rank retries to access its files, in seconds. The other ranks wait for it meanwhile.
FILE_TIMEOUT_S = 120.0
#: Maximum soft limit of open files: old programs close all descriptors below the limit, which may be 2**30.
MAX_OPEN_FILES = 2**20


def main(argv: list[str] | None = None) -> NoReturn:
    """Run one rank of the run folder named in `argv`; never returns."""
    (folder,) = sys.argv[1:] if argv is None else argv
    # Each connection needs a descriptor; the usual soft limit of 1024 is one for programs that call select().
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, MAX_OPEN_FILES), hard))
    with retry.patient(FILE_TIMEOUT_S):
        _run(Path(folder))


def _run(folder: Path) -> NoReturn:
    # Errors are printed until the rank is known: without it there is no outcome file.
    try:
        topology = Topology.from_env(os.environ)
        log_files.configure(rank=topology.rank)
        require_same(folder, os.environ)
        run = RunDir.open(folder)
    except (HpcdistError, OSError) as error:
        print(f"hpcdist worker: {error}", file=sys.stderr, flush=True)
        rank_outcome.exit_now(error.exit_code if isinstance(error, HpcdistError) else 1)
    attempt = run.attempt(topology.attempt)
    outcome = Outcome(attempt, topology.rank)
    try:
        conclude, limit_s = _work(run, attempt, topology, outcome)
    except Exception as error:
        code = outcome.write_error(error)
        rank_outcome.end(lambda: code, rank_outcome.FAILED_S)

    def conclude_or_fail() -> int:
        try:
            conclude()
        except Exception as error:
            return outcome.write_error(error)
        return 0

    rank_outcome.end(conclude_or_fail, limit_s)


def _work(run: RunDir, attempt: Attempt, topology: Topology, outcome: Outcome) -> tuple[Callable[[], None], float]:
    """Run the training. Returns a function that records its success, and the time limit of the end of this process.

    Until that function is called the run has not ended: what goes wrong in threads or functions of `atexit` counts.
    """
    dump_on_signal(attempt, topology.rank, topology.world_size)
    enable_flight_recorders(attempt, os.environ)
    config = load_run_config(run.config, [], {"HPCDIST_TRACKING_URI": "", **os.environ})
    limit_log(run.path, config.launch.log_max_mb)
    os.environ.update(cache_environment(os.environ, run.path))
    records = _begin_records(config, run, attempt, topology)
    ended: Literal["done", "stopped"]
    if config.trainer.script:
        with (
            script_api.entered_script(config, attempt, topology, records) as script,
            _node_monitor(config, run, topology, records),
        ):
            outcome.step = script.last_step
            run_script(config.trainer.script, run, topology, Roles.of(config.roles, topology.world_size))
        ended = "stopped" if script.stop_agreed or retry.exists(attempt.request) else "done"
        how = "obeyed hpcdist.should_stop" if script.stop_agreed else "ended with exit status 0"
        reason = f"{config.trainer.script_name} {how}"
    else:
        try:
            ended, reason = _train(config, run, attempt, topology, outcome, records)
        except BaseException:
            records.journal.close()
            raise

    def conclude() -> None:
        records.close()
        if topology.rank == 0:
            outcome.write(ended, reason=reason)
        outcome.close()

    # Neither the hang detection nor the grace period of a stop ends a rank that waits for its threads.
    return conclude, min(config.launch.stop_grace_s, config.launch.hang_s) / 2


def _begin_records(config: Config, run: RunDir, attempt: Attempt, topology: Topology) -> RankRecords:
    """Begin the records of this rank, and set the variables by which MLflow finds them.

    `launch.env.MLFLOW_TRACKING_URI` leaves MLflow in the ranks as the config says.
    """
    records = begin(RankRecords(run, attempt=attempt.number, rank=topology.rank, pid=os.getpid()))
    if URI_VARIABLE in config.launch.env:
        return records
    if is_declared():
        os.environ.update(records.environment())
    elif topology.rank == 0:
        log.warning(
            "what the code logs with MLflow does not reach this run, since the installation of hpcdist is older than"
            " its code: install it again (`pip install --editable .` in a checkout)"
        )
    return records


def _train(
    config: Config, run: RunDir, attempt: Attempt, topology: Topology, outcome: Outcome, records: RankRecords
) -> tuple[Literal["done", "stopped"], str]:
    """Connect the ranks, run the trainer, and return how and why it ended."""
    # Before torch: its import takes a second, in which a signal may arrive.
    stop_flag = StopFlag()
    stop_flag.install()
    _set_rank_environment(config, topology)
    # Objects created by imports are never freed; collecting garbage during the import takes a sixth of torch's import.
    gc.disable()
    from hpcdist.rank.context import Context
    from hpcdist.rank.device import gpu_uuid, place, seed_everything
    from hpcdist.rank.stopping import StopAgreement
    from hpcdist.rank.system_metrics import EnergyMeter
    from hpcdist.rank.telemetry import Heartbeat
    from hpcdist.run.commands import RequestReader

    hang_s, nan_losses = config.launch.hang_s, config.stop.nan_losses
    heartbeat = Heartbeat(attempt, topology.rank, topology.world_size, hang_s, nan_losses)
    outcome.step = lambda: heartbeat.step
    train = load_trainer(config.trainer.target)
    params = arguments_of(train, config.params)
    gc.freeze()  # exclude the imported objects from later collections
    gc.enable()
    device, backend = place(config, topology, os.environ)
    heartbeat.energy = EnergyMeter(gpu_uuid(device), os.environ if topology.local_rank == 0 else None).joules
    seed_everything(config.seed)
    with (
        _connected_groups(config, attempt, topology, device, backend, outcome) as groups,
        _node_monitor(config, run, topology, records),
    ):
        requests = RequestReader(attempt) if topology.rank == 0 else None
        ctx = Context(
            config=config,
            run=run,
            attempt=attempt,
            topology=topology,
            device=device,
            groups=groups,
            stop=StopAgreement(groups.control, stop_flag, requests, config.stop.pause_at_step),
            journal=records.journal,
            heartbeat=heartbeat,
        )
        records.on_metrics = heartbeat.note_logged
        script_api.enter(ctx)
        with exit_as_return(config.trainer.target):
            train(ctx, config, *params)
        ctx.close()
    return "stopped" if ctx.stop_agreed else "done", ctx.end_reason


def _node_monitor(config: Config, run: RunDir, topology: Topology, records: RankRecords) -> NodeMonitor:
    """Return the recorder of the system metrics, which is active in local rank 0 of each node. It imports no torch."""
    from hpcdist.rank.system_metrics import NodeMonitor

    system_s = system_interval_s(config.tracking.system_interval_s, topology.num_nodes)
    return NodeMonitor(
        records.journal,
        interval_s=system_s if topology.local_rank == 0 else 0.0,
        began=run.read_state().created,
        node=socket.gethostname() if topology.num_nodes > 1 else None,
        disk=str(run.path),
    )


@contextmanager
def _connected_groups(
    config: Config, attempt: Attempt, topology: Topology, device: torch.device, backend: str, outcome: Outcome
) -> Iterator[Groups]:
    """Connect the ranks and yield their process groups; on several nodes, check an all-reduce first."""
    from hpcdist.rank.process_group import process_groups

    timeout_s = config.launch.init_timeout_s
    check_mode = config.preflight.mode if topology.num_nodes > 1 else "off"
    if check_mode != "off" and backend == "nccl":
        from hpcdist.rank.collective_check import log_env

        os.environ.update(log_env(topology, attempt, os.environ))
    timeout_error = RendezvousError(
        f"rank {topology.rank} could not connect to the other ranks at {topology.master_addr}:{topology.master_port}"
        f" within launch.init_timeout_s={timeout_s:g} s: does another program listen on this port?"
    )
    with process_groups(
        topology,
        device,
        backend,
        attempt.read_key(),
        attempt.path,
        init_timeout_s=timeout_s,
        # Longer than the supervisor's timeout: the supervisor finds the hung rank, a collective only those waiting.
        timeout_s=config.launch.hang_s + 60,
        on_expiry=lambda: rank_outcome.exit_now(outcome.write_error(timeout_error)),
    ) as groups:
        if check_mode != "off":
            from hpcdist.rank.collective_check import EFFORTS, check

            check(
                check_mode,
                topology,
                device,
                backend,
                groups,
                attempt,
                timeout_s=timeout_s + 10 * EFFORTS[check_mode].budget_s,
                on_expiry=lambda error: rank_outcome.exit_now(outcome.write_error(error)),
            )
        yield groups


def _set_rank_environment(config: Config, topology: Topology) -> None:
    """Set the environment variables that depend on the rank. torch, gloo and NCCL read them at import or start."""
    roles = Roles.of(config.roles, topology.world_size)
    role, _ = roles.of_rank(topology.rank)
    log.info("this is %s of %s", roles.name_of(topology.rank), roles)
    if role_device(config, role) == "cpu" and config.launch.device != "cpu":
        # RPC would initialise all visible GPUs, also in ranks that compute on the CPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if topology.launcher == "slurm":
        from hpcdist.rank.private_network import interface_env

        os.environ.update(interface_env(topology.master_addr, os.environ))


def load_trainer(target: str) -> Callable[..., None]:
    """Return the training function named by `trainer.target`: a shipped trainer, or `package.module:function`.

    Raises TrainerError if it cannot be imported or is not callable; the cause is an error in the module, if it exists.
    """
    module_name, colon, function_name = target.partition(":")
    if not colon:
        module_name, function_name = f"hpcdist.trainers.{target}.train", "train"
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        message = f"trainer {target!r} cannot be imported: {type(error).__name__}: {error}"
        raise TrainerError(message) from (None if is_missing else error)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise TrainerError(f"trainer {target!r}: {module.__file__} has no function {function_name!r}")
    return cast(Callable[..., None], function)


# Unmodified scripts as trainers, as torchrun starts them.


def script_environment(topology: Topology, run: RunDir, roles: Roles) -> dict[str, str]:
    """Return the environment variables of torchrun, and those of hpcdist.

    Reference: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    role, index = roles.of_rank(topology.rank)
    return {
        "RANK": str(topology.rank),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_RANK": str(topology.local_rank),
        "LOCAL_WORLD_SIZE": str(topology.local_world_size),
        "GROUP_RANK": str(topology.node_rank),
        "GROUP_WORLD_SIZE": str(topology.num_nodes),
        "ROLE_NAME": role,
        "ROLE_RANK": str(index),
        "ROLE_WORLD_SIZE": str(roles.count(role)),
        "MASTER_ADDR": topology.master_addr,
        "MASTER_PORT": str(topology.master_port),
        "TORCHELASTIC_RUN_ID": topology.job_id,
        "TORCHELASTIC_RESTART_COUNT": str(max(topology.attempt - 1, 0)),
        "HPCDIST_RUN_DIR": str(run.path),
        "HPCDIST_CHECKPOINT_DIR": str(run.checkpoints),
        "HPCDIST_ATTEMPT": str(topology.attempt),
        "HPCDIST_ROLE": role,
        "HPCDIST_ROLE_INDEX": str(index),
        "HPCDIST_ROLES": json.dumps(dict(roles.counts)),
    }


def run_script(command: Sequence[str], run: RunDir, topology: Topology, roles: Roles) -> None:
    """Run `[script, argument, …]` or `[-m, module, argument, …]` as `__main__` in this process, from the code snapshot.

    The script handles signals itself; hpcdist installs no handlers.

    Raises TrainerError if the script does not exist, RuntimeError if it exits with a non-zero status, and any exception
    of the script.
    """
    is_module = command[0] == "-m"
    script, *arguments = command[is_module:]
    path = script if is_module else str(run.snapshot_of(Path(script)) or script)
    if not is_module and not Path(path).is_file():
        raise TrainerError(f"trainer.script: no such file: {script}")
    if path != script and topology.rank == 0:
        log.info("running the copy %s; links in it lead to files beside %s that are not copied", path, script)
    os.environ.update(script_environment(topology, run, roles))
    sys.argv = [path, *arguments]
    with exit_as_return(script):
        if is_module:  # the copy of the code is on sys.path
            if importlib.util.find_spec(script) is None:
                raise TrainerError(f"trainer.script: no module {script!r}")
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(path).parent))
            runpy.run_path(path, run_name="__main__")


@contextmanager
def exit_as_return(name: str) -> Iterator[None]:
    """Let `sys.exit` end the block. Raises RuntimeError after an exit with a non-zero status."""
    try:
        yield
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise RuntimeError(f"{name} ended with exit status {ended.code}") from ended


if __name__ == "__main__":
    main()
