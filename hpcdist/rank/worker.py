"""The process of one rank, forked by its parent or `python -m hpcdist.rank.worker RUN_FOLDER`, and its end.

Exit codes:

    0  the training is done, or was stopped after a checkpoint
    1  failed; a restart may succeed
    2  rejected because of an error of the user, such as an invalid config; a restart cannot succeed
"""

import _io
import atexit
import gc
import importlib
import importlib.util
import json
import logging
import multiprocessing
import os
import re
import resource
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, cast

from hpcdist.config.launch_schema import NVIDIA
from hpcdist.config.loading import load_run_config
from hpcdist.config.roles import Roles
from hpcdist.config.schema import Config, role_device
from hpcdist.config.topology import Topology
from hpcdist.config.written import arguments_of
from hpcdist.errors import HpcdistError, PeerLost, RendezvousError, TrainerError, UserMistake
from hpcdist.host import log_files, retry
from hpcdist.host.compiler import CACHE_VARIABLE, cache_environment
from hpcdist.host.json_files import write_json
from hpcdist.rank import compile_cache, memory_history, script_api
from hpcdist.rank.processes import COLLECTIVE_MARGIN_S, FILE_TIMEOUT_S, StopFlag
from hpcdist.rank.telemetry import Heartbeat, dump_on_signal, enable_flight_recorders, has_joined_group
from hpcdist.run.exit_error import with_last_line, without_last_line
from hpcdist.run.folder import Attempt, RunDir, require_same
from hpcdist.run.rank_requests import RequestReader
from hpcdist.run.script_ranks import find_spawn_in_copy
from hpcdist.tracking.rank_records import URI_VARIABLE, RankRecords, begin, is_declared
from hpcdist.tracking.written_files import WrittenFiles

if TYPE_CHECKING:
    from hpcdist.rank.device import Device
    from hpcdist.rank.process_group import Groups

#: Named explicitly because this module may run as `__main__`, and only loggers of hpcdist are configured.
log = logging.getLogger("hpcdist.rank.worker")
#: Limit of open files. Not the hard limit, which may be 2**30: old programs close all descriptors below the limit.
_MAX_FILES = 2**20


def main() -> NoReturn:
    """Run the rank of this process; the only argument is the run folder."""
    (folder,) = sys.argv[1:]
    # Each connection needs a descriptor; the usual soft limit of 1024 is meant for programs that call select().
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard_limit, _MAX_FILES), hard_limit))
    with retry.patient(FILE_TIMEOUT_S):
        _run_and_end(Path(folder))


def _run_and_end(folder: Path) -> NoReturn:
    # Errors are printed until rank and run folder are known: without them there is no outcome file.
    try:
        topology = Topology.from_env(os.environ)
        log_files.configure(rank=topology.rank)
        require_same(folder, os.environ)
        run = RunDir.open(folder)
    except (HpcdistError, OSError) as error:
        print(f"hpcdist worker: {error}", file=sys.stderr, flush=True)
        code = HpcdistError.exit_code
        if isinstance(error, HpcdistError):
            code = error.exit_code
        exit_now(code)
    attempt = run.attempt(topology.attempt)
    outcome = Outcome(attempt, topology.rank)
    try:
        conclude, limit_s = _run_script_or_trainer(run, attempt, topology, outcome)
    except Exception as error:
        code = outcome.write_error(error)
        end(lambda: code, FAILED_S)
    end(conclude, limit_s, outcome.note_late)


def _run_script_or_trainer(
    run: RunDir, attempt: Attempt, topology: Topology, outcome: "Outcome"
) -> tuple[Callable[[], int], float]:
    """Run the training.

    Returns a function that records the success and returns the exit code, and the time limit of the end of this
    process. Until that function is called the rank has not succeeded: it has failed if a thread or a function of
    `atexit` kills the process.
    """
    dump_on_signal(attempt, topology.rank)
    enable_flight_recorders(attempt, os.environ)
    # An address with a password is not kept in the config, nor passed to ranks in a container, which do not need it.
    config = load_run_config(run.config, [], {"HPCDIST_TRACKING_URI": "", **os.environ})
    log_files.limit_log(run.path)
    memory_history.record_when_used()
    local_cache = cache_environment(os.environ, run.path)
    os.environ.update(local_cache)
    records = begin(RankRecords(run, attempt=attempt.number, rank=topology.rank, pid=os.getpid()))
    # MLflow in the ranks writes into this run, unless the config sets its store by launch.env.MLFLOW_TRACKING_URI.
    if URI_VARIABLE not in config.launch.env:
        if is_declared():
            os.environ.update(records.environment())
        elif topology.rank == 0 and importlib.util.find_spec("mlflow"):
            log.warning(
                "metrics that the code logs with MLflow do not reach this run, since hpcdist is not installed, or an"
                " older version of it: install it (`pip install --editable .` in a checkout)"
            )
    with _kept_compile_cache(config, run, local_cache):
        if config.trainer.script:
            ended, reason = _run_trainer_script(config, run, attempt, topology, outcome, records)
        else:
            try:
                ended, reason = _run_trainer(config, run, attempt, topology, outcome, records)
            except BaseException:
                records.journal.close()
                raise

    def conclude() -> int:
        try:
            records.close()
            if topology.rank == 0 or outcome.is_late:
                outcome.write(ended, reason=reason)
            outcome.close()
        except Exception as error:
            return outcome.write_error(error)
        return 0

    # Half of the smaller limit, so that the supervisor does not kill a rank that waits for its threads.
    return conclude, min(config.launch.stop_grace_s, config.launch.hang_s) / 2


def _kept_compile_cache(config: Config, run: RunDir, local: Mapping[str, str]) -> AbstractContextManager[None]:
    """Return a block that keeps the code that torch.compile makes in it. `local`: the result of `cache_environment`."""
    if not local:  # the user has set the cache's folder
        return nullcontext()
    starts_ranks = bool(config.trainer.script) and find_spawn_in_copy(config, run) is not None
    return compile_cache.kept(config.compiled_folder, Path(local[CACHE_VARIABLE]), now=starts_ranks)


def _run_trainer_script(
    config: Config, run: RunDir, attempt: Attempt, topology: Topology, outcome: "Outcome", records: RankRecords
) -> tuple[Literal["done", "stopped"], str]:
    """Run the script of the config. Returns how it ended, and the reason for the status of the run."""
    from hpcdist.rank.system_metrics import monitored_node

    if topology.rank == 0 and config.tracking.script_files:
        sys.addaudithook(WrittenFiles(attempt).note)
    with (
        script_api.entered_script(config, attempt, topology, records) as script,
        monitored_node(config, run, topology, records.journal),
    ):
        outcome.step = script.last_step
        set_script_environment(config, run, topology)
        run_script(config.trainer.script, run, topology)
    is_requested = script.stop_agreed or retry.exists(attempt.request)
    how = "ended with exit status 0"
    if script.stop_agreed:
        how = "obeyed hpcdist.should_stop"
    reason = f"{config.trainer.script_name} {how}"
    if is_requested:
        return "stopped", reason
    reason += at_step(script.last_step(), script.total_steps)
    return "done", reason + separate_ranks(config, topology, has_joined_group(os.environ))


def separate_ranks(config: Config, topology: Topology, has_joined: bool | None) -> str:
    """Return the end of a sentence that says that the ranks of a script never met; empty unless that is known.

    Args:
        has_joined: see `has_joined_group`; of rank 0, without which no other rank joins a group of all.
    """
    if topology.world_size == 1 or has_joined is not False or config.launch.gpu_type != NVIDIA:
        return ""  # the recorder of other GPUs is unknown here
    once = "launch.num_ranks=1"
    if topology.launcher == "slurm":
        once = "cluster.nodes=1 cluster.tasks_per_node=1"
    return (
        f"; its {topology.world_size} ranks never connected to each other by torch.distributed: if it starts its own"
        f" ranks, they were separate trainings, and {once} starts it once"
    )


def _run_trainer(
    config: Config, run: RunDir, attempt: Attempt, topology: Topology, outcome: "Outcome", records: RankRecords
) -> tuple[Literal["done", "stopped"], str]:
    """Run the trainer of the config. Returns how it ended, and the reason for the status of the run."""
    # Before the import of torch, a second in which a signal may arrive, unless the rank was forked.
    stop_flag = StopFlag()
    stop_flag.install()
    roles = Roles.of(config.roles, topology.world_size)
    role, _ = roles.of_rank(topology.rank)
    log.info("this is %s of %s", roles.name_of(topology.rank), roles)
    _set_variables_of_torch(config, topology, role)
    # Objects created by imports are never freed; collecting garbage during the import takes a sixth of torch's import.
    gc.disable()
    from hpcdist.rank.context import Context, close
    from hpcdist.rank.device import listed, select_device
    from hpcdist.rank.process_group import seed_everything
    from hpcdist.rank.stopping import StopAgreement
    from hpcdist.rank.system_metrics import EnergyMeter, monitored_node

    heartbeat = Heartbeat(attempt, topology.rank, topology.world_size, config.launch.hang_s, config.stop.nan_losses)
    outcome.step = lambda: int(heartbeat.step)
    train = load_trainer(config.trainer.target)
    params = arguments_of(train, config.params, config.param_texts)
    # Neither a collection nor the search for open files at the end reads the imported objects: this would copy memory
    # that a forked rank shares with its parent, and a restart would wait 0.1 s for it.
    _imported_files.update(_files())
    gc.freeze()
    gc.enable()
    device = select_device(config, topology, os.environ)
    env_of_node = os.environ if topology.local_rank == 0 else None
    heartbeat.energy = EnergyMeter(device.uuid, env_of_node).joules
    seed_everything(config.seed)
    with (
        _connected_groups(config, attempt, topology, device, outcome) as groups,
        monitored_node(config, run, topology, records.journal),
    ):
        names = _exchange_devices(device, topology, groups)
        requests = RequestReader(attempt) if topology.rank == 0 else None
        ctx = Context(
            config=config,
            run=run,
            attempt=attempt,
            topology=topology,
            device=device.device,
            devices=listed(names),
            groups=groups,
            stop=StopAgreement(groups.control, stop_flag, requests),
            records=records,
            heartbeat=heartbeat,
        )
        outcome.num_micro_batches = lambda: ctx.elastic.num_micro_batches
        script_api.enter(ctx)
        with exit_as_return(config.trainer.target):
            train(ctx, config, *params)
        ended = close(ctx)
    reason = ctx.end_reason
    if ended == "done" and not reason:
        reason = f"the trainer has finished{at_step(heartbeat.step, heartbeat.total_steps)}"
    return ended, reason


def _set_variables_of_torch(config: Config, topology: Topology, role: str) -> None:
    """Set environment variables that torch, gloo and NCCL read at their import or start."""
    if role_device(config, role) == "cpu" and config.launch.device != "cpu":
        # Otherwise a rank that computes on the CPU could initialise the GPUs of others.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if topology.launcher == "slurm":
        from hpcdist.rank.network_interface import interface_env

        os.environ.update(interface_env(topology.master_addr, os.environ))


def _exchange_devices(device: "Device", topology: Topology, groups: "Groups") -> list[str]:
    """Return the names of the devices of all ranks, and bind this rank to the CPUs beside its GPU."""
    from hpcdist.rank.device import bind_to_cpus, cpus_beside

    cpus = cpus_beside(device)
    place = (topology.node_rank, cpus)  # equal for ranks that share these CPUs
    devices = groups.all_gather((device.name, place))
    places = [other_place for _, other_place in devices]
    bind_to_cpus(cpus, places.count(place), os.environ)
    return [name for name, _ in devices]


def at_step(step: int | None, total_steps: int | None) -> str:
    """Return ` at step 200 of 200` as the end of a sentence; empty if no step is known."""
    if not step:
        return ""
    if total_steps is None:
        return f" at step {step}"
    return f" at step {step} of {total_steps}"


@contextmanager
def _connected_groups(
    config: Config, attempt: Attempt, topology: Topology, device: "Device", outcome: "Outcome"
) -> Iterator["Groups"]:
    """Connect the ranks and yield their process groups; on several nodes, check an all-reduce first."""
    from hpcdist.rank.process_group import process_groups

    timeout_s = config.launch.init_timeout_s
    is_checked = config.preflight.mode == "on" and topology.num_nodes > 1
    if is_checked and device.backend != "gloo":
        from hpcdist.rank.collective_check import log_env

        os.environ.update(log_env(topology, attempt, os.environ))

    def give_up(error: HpcdistError) -> NoReturn:
        exit_now(outcome.write_error(error))

    late = RendezvousError(
        f"rank {topology.rank} could not connect to the other ranks at {topology.master_addr}:{topology.master_port}"
        f" within launch.init_timeout_s={timeout_s:g} s: does another program listen on this port?"
    )
    with process_groups(
        topology,
        device.device,
        device.backend,
        attempt.read_key(),
        attempt.path,
        init_timeout_s=timeout_s,
        timeout_s=config.launch.hang_s + COLLECTIVE_MARGIN_S,
        on_expiry=lambda: give_up(late),
    ) as groups:
        if is_checked:
            from hpcdist.rank.collective_check import check

            check(topology, device.device, device.backend, groups, attempt, timeout_s=timeout_s, on_expiry=give_up)
        yield groups


def load_trainer(target: str) -> Callable[..., None]:
    """Return the training function named by `trainer.target`: a shipped trainer, or `package.module:function`.

    A TrainerError has a cause if the module exists and raises an error.
    """
    module_name, colon, function_name = target.partition(":")
    if not colon:
        module_name, function_name = f"hpcdist.trainers.{target}.train", "train"
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        message = f"trainer {target!r} cannot be imported: {type(error).__name__}: {error}"
        # Is the missing module the trainer's own, or a package that contains it, rather than one that it imports?
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        if is_missing:
            raise TrainerError(message) from None
        raise TrainerError(message) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise TrainerError(f"trainer {target!r}: {module.__file__} has no function {function_name!r}")
    return cast(Callable[..., None], function)


# Unmodified scripts as trainers, as torchrun starts them.


#: Variables of another launcher, such as a torchrun around `hpcdist run`, that would mislead a script; torchrun itself
#: does not set NODE_RANK.
_OF_OTHER_LAUNCHERS = re.compile(r"TORCHELASTIC_.*|NODE_RANK")


def script_environment(topology: Topology, run: RunDir, roles: Roles, max_restarts: int) -> dict[str, str]:
    """Return the environment variables of a script: the ones that torchrun sets, and further ones of hpcdist.

    Reference: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables, and `_start_workers` of the
    class `torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent`
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
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        # Rank 0 of the script listens on MASTER_PORT; below torchrun its agent may.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "HPCDIST_RUN_DIR": str(run.path),
        "HPCDIST_CHECKPOINT_DIR": str(run.checkpoints),
        "HPCDIST_ATTEMPT": str(topology.attempt),
        "HPCDIST_ROLE": role,
        "HPCDIST_ROLE_INDEX": str(index),
        "HPCDIST_ROLES": json.dumps(dict(roles.counts)),
    }


def set_script_environment(config: Config, run: RunDir, topology: Topology) -> None:
    """Set the variables of `script_environment` in this process, and remove those of another launcher around it."""
    roles = Roles.of(config.roles, topology.world_size)
    for name in [*os.environ]:
        if _OF_OTHER_LAUNCHERS.fullmatch(name) and name not in config.launch.env:
            del os.environ[name]
    os.environ.update(script_environment(topology, run, roles, config.launch.max_restarts))
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")


def run_script(command: Sequence[str], run: RunDir, topology: Topology) -> None:
    """Run `[script, argument, …]` or `[-m, module, argument, …]` as `__main__` from the code snapshot."""
    is_module = command[0] == "-m"
    if is_module:
        _, script, *arguments = command
        path = script
    else:
        script, *arguments = command
        path = str(run.snapshot_of(Path(script)) or script)
        if not Path(path).is_file():
            raise TrainerError(f"trainer.script: no such file: {script}")
    if path != script and topology.rank == 0:
        log.info("running the copy %s; links in it lead to files beside %s that are not copied", path, script)
    sys.argv = [path, *arguments]
    with exit_as_return(script):
        if is_module:  # found in the copy of the code, which is on sys.path
            if importlib.util.find_spec(script) is None:
                raise TrainerError(f"trainer.script: no module {script!r}")
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(path).parent))
            runpy.run_path(path, run_name="__main__")


@contextmanager
def exit_as_return(name: str) -> Iterator[None]:
    """Let `sys.exit` end the block without an error if the exit status is 0.

    Raises RuntimeError, with the traceback of the exit, for another status. As in Python, a code that is no number is
    a message, and the status is then 1. Code that exits with a number has usually printed the reason, as argparse does,
    so the error contains the last line that this process has printed in the block.
    """
    begin = log_files.output_size()
    try:
        yield
    except SystemExit as ended:
        code = ended.code
        if code is None:
            return
        if not isinstance(code, int):
            status = f"1: {code}"
        elif code != 0:
            status = with_last_line(str(code), log_files.last_line_of_output(begin))
        else:
            return
        error = RuntimeError(f"{name} ended with exit status {status}")
        raise error.with_traceback(ended.__traceback__) from None


# The outcome file of a rank, in which the supervisor reads how the rank ended.
#
# Rank 0 writes `attempts/NNN/rank-00000.outcome.json` after a success; every rank that fails, or whose process ends
# late, writes its own. A rank that is killed writes nothing, and the supervisor sees its exit status.

#: Parts of error messages of gloo, NCCL, TensorPipe and the store when another rank has died.
_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "NCCL",
    "tensorpipe",
)
#: Maximum number of characters of the error and of the traceback; the log has the whole text.
_MAX_TEXT = 10_000
#: Disk space that an outcome occupies at most, in bytes, except for long errors.
_RESERVE_BYTES = 16 * 1024


class Outcome:
    """Writes the outcome file of one rank.

    It reserves disk space at once and frees it before writing, so that a rank that fails because the disk is full can
    still write its outcome.
    """

    def __init__(self, attempt: Attempt, rank: int) -> None:
        self._path = attempt.outcome(rank)
        self._rank = rank
        self._reserve = attempt.path / f".rank-{rank:05d}.reserve"
        self._late: dict[str, Any] = {}
        #: Returns the number of steps done, if known.
        self.step: Callable[[], int | None] = lambda: None
        #: Returns the number of micro-batches of an elastic run, if known.
        self.num_micro_batches: Callable[[], int | None] = lambda: None
        with suppress(OSError):  # the disk is already full: try to write the outcome without a reserve
            self._reserve.write_bytes(bytes(_RESERVE_BYTES))

    def write(self, outcome: Literal["done", "stopped", "failed", "rejected"], **details: Any) -> None:
        """Write how the rank ended, with further details."""
        self.close()
        result: dict[str, Any] = {
            "outcome": outcome,
            "rank": self._rank,
            "host": socket.gethostname(),
            "time": time.time(),
            "step": self.step(),
        }
        if self._late:
            result["late"] = self._late
        write_json(self._path, {**result, **details})

    def note_late(self, since: float, what: str, *, is_busy: bool) -> None:
        """Note what has kept this process since its code has ended.

        Args:
            since: seconds since the epoch.
            is_busy: whether it has computed.
        """
        self._late = {"since": since, "what": _shorten(what), "busy": is_busy}

    @property
    def is_late(self) -> bool:
        """Whether something has kept this process after the end of its code."""
        return bool(self._late)

    def close(self) -> None:
        """Free the reserved disk space."""
        retry.discard(self._reserve)

    def write_error(self, error: BaseException) -> int:
        """Log an error, write the outcome, and return the exit code.

        An error of hpcdist is logged without a traceback, unless the user's code is its cause.
        """
        run = RunDir(self._path.parents[2])
        text = str(error) or type(error).__name__
        trace = _traceback(error, run.code)
        with suppress(HpcdistError, OSError):
            text = run.with_original_paths(text)
            trace = run.with_original_paths(trace)
        lines = []
        if isinstance(error, HpcdistError):
            lines.append(text)
        if trace:
            lines.append(trace.rstrip())
        log.error("%s", "\n".join(lines))
        is_peer_lost = isinstance(error, PeerLost)
        # The last line of a script is no error of torch: NCCL_DEBUG=INFO prints the word NCCL in it.
        message = without_last_line(text)
        if isinstance(error, RuntimeError) and any(part in message for part in _PEER_LOST):
            is_peer_lost = True
        if not isinstance(error, HpcdistError):
            text = f"{type(error).__name__}: {text}"
        details: dict[str, Any] = {"error": _shorten(text), "peer_lost": is_peer_lost, "traceback": []}
        if trace:
            details["traceback"] = [_shorten(trace)]
        if memory_history.is_out_of_memory(error):
            details["num_micro_batches"] = self.num_micro_batches()
            details["device_memory"] = memory_history.memory_record(text)
        if isinstance(error, UserMistake | SyntaxError):
            self.write("rejected", **details)
            return UserMistake.exit_code
        self.write("failed", **details)
        return HpcdistError.exit_code


def _traceback(error: BaseException, code: Path) -> str:
    """Return the traceback of an error for the user; empty for an error of hpcdist itself.

    Args:
        code: the folder with the copy of the user's code.
    """
    if isinstance(error, TrainerError):
        if error.__cause__ is None:
            return _wrong_call(error, code)
        error = error.__cause__  # the error in the user's module
    elif isinstance(error, HpcdistError):
        return ""
    return "".join(traceback.format_exception(error))


def _wrong_call(error: TrainerError, code: Path) -> str:
    """Return the traceback of an error as far as the user's line that calls hpcdist wrongly; empty without one."""
    frames = traceback.extract_tb(error.__traceback__)
    while frames and not Path(frames[-1].filename).is_relative_to(code):
        frames.pop()
    if not frames:
        return ""
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames)])


def _shorten(text: str) -> str:
    """Return a text without its middle if it is longer than _MAX_TEXT characters."""
    num_omitted = len(text) - _MAX_TEXT
    if num_omitted <= 0:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n… {num_omitted} characters, see the log …\n{text[-half:]}"


# The end of a rank's process: as Python ends one, but within a time limit.
#
# Threads are joined, functions of `atexit` are called and open files are flushed. Then `os._exit` ends the process:
# destructors of gloo and NCCL may block when other ranks have died, and so may threads of libraries.

#: Time limit after a failure: the restart waits for the end of all ranks.
FAILED_S = 3.0
#: Time for functions of `atexit` if threads have used up the limit, and for flushing files.
ATEXIT_S = 3.0
#: Additional time for calls that a signal does not interrupt.
_STUCK_S = 2.0
#: Open files of the imports.
_imported_files: "weakref.WeakSet[Any]" = weakref.WeakSet()


#: Share of a core beyond which a process that does not end is working, such as on the compression of a file.
_BUSY_SHARE = 0.1


class _TimeIsUp(Exception): ...


class _NoteLate(Protocol):
    def __call__(self, since: float, what: str, *, is_busy: bool) -> None: ...


def _note_nothing(since: float, what: str, *, is_busy: bool) -> None: ...


def end(conclude: Callable[[], int], limit_s: float, note_late: _NoteLate = _note_nothing) -> NoReturn:
    """End this process as Python does, with the exit code of `conclude`.

    Threads and functions of `atexit` share `limit_s`, but the latter have at least ATEXIT_S.

    Args:
        note_late: is called before `conclude` if something has to be cut off, see `Outcome.note_late`.
    """
    since = time.time()
    until = time.monotonic() + limit_s
    used_s = _used_cpu_s()
    late: list[str] = []

    def conclude_and_exit() -> NoReturn:
        is_busy = _used_cpu_s() - used_s > _BUSY_SHARE * (time.time() - since)
        if late:
            note_late(since, ", ".join(late), is_busy=is_busy)
        exit_now(conclude())

    def give_up() -> None:
        name = _name(threading.main_thread())
        log.warning("a function of atexit does not end, and is cut off: %s", name)
        late.append(name)
        conclude_and_exit()

    def interrupt(*_: object) -> NoReturn:
        raise _TimeIsUp

    stuck = threading.Timer(limit_s + 2 * ATEXIT_S + _STUCK_S, give_up)
    stuck.daemon = True
    stuck.start()
    signal.signal(signal.SIGALRM, interrupt)
    _within(limit_s, threading._shutdown)  # type: ignore[attr-defined]
    main_thread = threading.main_thread()
    running = [thread for thread in threading.enumerate() if not thread.daemon and thread is not main_thread]
    if running:
        late += map(_name, running)
        log.warning("%s: not ended within %g s, and cut off", ", ".join(late), limit_s)
    has_ended = _within(max(ATEXIT_S, until - time.monotonic()), atexit._run_exitfuncs)
    children = [f"{child.name} ({child.pid})" for child in multiprocessing.active_children()]
    if children:
        late.append(f"child processes {', '.join(children)}")
        log.warning("child processes %s: not ended, and killed", ", ".join(children))
    elif not has_ended:
        late.append("a function of atexit")
    _within(ATEXIT_S, _flush_files)
    stuck.cancel()
    conclude_and_exit()


def _used_cpu_s() -> float:
    """Return the CPU time of this process, and of its child processes that `multiprocessing` has started."""
    used_s = time.process_time()
    children = multiprocessing.active_children()
    if children:
        import psutil  # slow to import, and seldom needed

        for child in children:
            with suppress(psutil.Error):
                times = psutil.Process(child.pid).cpu_times()
                used_s += times.user + times.system
    return used_s


def exit_now(code: int) -> NoReturn:
    """End this process at once; only its output is flushed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _within(seconds: float, call: Callable[[], object]) -> bool:
    """Call a function, and interrupt it after some seconds. As in Python, its errors do not change the exit code.

    Returns whether it has ended in time: `atexit` catches the exception of the interruption.
    """
    began = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _TimeIsUp:
        pass
    except Exception:
        log.exception("an error at the end of the process is ignored")
    return time.monotonic() - began < seconds


def _name(thread: threading.Thread) -> str:
    """Return the name of a thread, and the line of code that it executes."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return f"thread {thread.name!r}"
    return f"thread {thread.name!r} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _files() -> list[Any]:
    """Return the file objects of this process; after `gc.freeze`, only those that were created since."""
    # Not an abstract class of `io`: its check takes ten times as long.
    return [value for value in gc.get_objects() if issubclass(type(value), _io._IOBase)]


def _flush_files() -> None:
    """Flush open files, which Python flushes when it deletes the objects of all modules."""
    for file in (*_imported_files, *_files()):
        try:
            if not file.closed and file.writable():
                file.flush()
        except OSError as error:
            log.warning("%r is not written completely: %s", file, error.strerror)
        except ValueError:
            pass  # closed by the flush of another file, or detached from its descriptor


if __name__ == "__main__":
    main()
