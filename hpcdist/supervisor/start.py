"""From a config to a run under way: make its folder, supervise it here, or leave that to a process of its own."""

from __future__ import annotations

import importlib.machinery
import logging
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hpcdist.config.schema import Config, find_trainer, trainer_names
from hpcdist.config.written import run_yaml, secrets_of
from hpcdist.errors import ConfigError, TrackingError
from hpcdist.files import retry
from hpcdist.machine.own_image import image_facts
from hpcdist.run import secret_file, snapshot
from hpcdist.run.folder import RunDir, State, read_record, write_atomic, write_json
from hpcdist.run.lease import hold
from hpcdist.supervisor.launcher import Reporter
from hpcdist.supervisor.local_launcher import LocalLauncher
from hpcdist.supervisor.plan import Plan
from hpcdist.supervisor.shipper_process import ShipperProcess, ship_once
from hpcdist.supervisor.supervisor import Supervisor
from hpcdist.tracking.uri import choose_uri, is_server

log = logging.getLogger(__name__)


def with_name(config: Config) -> Config:
    """The config with a run name: its own, or one of trainer, time and chance."""
    if config.name:
        return config
    return replace(config, name=f"{label_of(config)}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")


def label_of(config: Config) -> str:
    """What the names of runs begin with that are given none: the trainer's."""
    return Path(config.trainer.script[0]).stem if config.trainer.script else config.trainer.target.replace(":", ".")


def check_trainer(config: Config, cwd: Path) -> None:
    """Raise ConfigError now, rather than in every rank later, when the script or module is not there."""
    if config.trainer.script:
        if not Path(config.trainer.script[0]).is_file():
            raise ConfigError([f"trainer.script: no such file: {config.trainer.script[0]}"])
        return
    module, colon, _ = config.trainer.target.partition(":")
    if not colon:
        trainer = find_trainer(module)
        if trainer is None:
            names = ", ".join(trainer_names())
            raise ConfigError(
                [f"trainer: {module!r} is not one of {names}; one of your own is package.module:function"]
            )
        if problems := trainer.check_host(config):
            raise ConfigError(problems)
        return
    top = module.partition(".")[0]
    if importlib.machinery.PathFinder.find_spec(top, [str(cwd), *sys.path]) is None:
        raise ConfigError([f"trainer.target: no module {top!r} in {cwd} or among the installed packages"])


def create_run(config: Config, cwd: Path, *, launcher: str = "local") -> RunDir:
    """Make the run folder with everything that a start, or a later resume, needs. Leaves nothing behind on errors."""
    run = RunDir.create(Path(config.runs_dir) / config.experiment / config.name)
    try:
        write_config(run, config)
        snapshot.write_environment(run, snapshot.take(config, run, cwd), launcher=launcher)
    except BaseException:
        shutil.rmtree(run.path)
        raise
    return run


def write_config(run: RunDir, config: Config) -> None:
    """Write a run's config without its secrets, and these into a file of their own."""
    secret_file.keep(run, secrets_of(config))
    write_atomic(run.config, run_yaml(config), durable=True)


def supervise(run: RunDir, config: Config, plan: Plan, report: Reporter, env: Mapping[str, str]) -> State:
    """Hold the run and see it through to its end; returns its last state.

    Raises RunFolderError when another supervisor holds it, or when it is only half made.
    """
    with retry.patient(retry.UNATTENDED_S), hold(run) as held:
        code = snapshot.code_state(run)
        facts = read_record(run.environment) or {}
        if facts | (image := image_facts(env)) != facts:  # the first start in this image
            write_json(run.environment, facts | image)
        # Where the run was started is gone on another machine; the code is in the run folder anyway.
        cwd = Path(code.cwd) if Path(code.cwd).is_dir() else run.path
        # What a rank reads in config.yaml is redacted; its environment gives the secrets back.
        env = {**env, **secrets_of(config)}
        import_path = snapshot.import_path(code, run)
        uri = choose_uri(env, config.tracking.uri, Path(config.runs_dir))
        with LocalLauncher(run, plan, env=env, import_path=import_path, cwd=cwd) as launcher:
            supervisor = Supervisor(run, config, launcher, report, tracking_uri=uri, env=env, check_lease=held.check)
            return supervisor.run()


def detach(run: RunDir, env: Mapping[str, str]) -> int:
    """Supervise in a process that outlives this one and the terminal; returns its process id."""
    with open(run.path / "supervisor.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hpcdist", "supervise", str(run.path)],
            env=dict(env),  # the run's secrets are in its folder
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process.pid


def ship_now(run: RunDir, config: Config, env: Mapping[str, str]) -> str:
    """Let MLflow show a run that waits in the queue; a sentence."""
    try:
        return ship_once(run, choose_uri(env, config.tracking.uri, Path(config.runs_dir)), env)
    except TrackingError as error:
        return f"not in MLflow yet: {error}"


@contextmanager
def shipping_from_here(run: RunDir, config: Config, env: Mapping[str, str]) -> Iterator[None]:
    """Ship a Slurm run from this host while the block lasts, unless its job does so itself (to a server).

    A block that is left by Ctrl-C leaves the run, which goes on, as it is.
    """
    try:
        uri = choose_uri(env, config.tracking.uri, Path(config.runs_dir))
    except TrackingError as error:
        log.warning("%s; the run is followed, not shipped from here", error)
        yield
        return
    if is_server(uri):
        ship_now(run, config, env)
        yield
        # The job has shipped its end, unless it died without a word: then there is something left to say.
        ship_now(run, config, env)
        return
    shipper = ShipperProcess(run, uri, env, through_queue=True)
    yield
    shipper.drain(config.tracking.drain_timeout_s)
