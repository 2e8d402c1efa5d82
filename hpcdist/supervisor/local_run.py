"""Supervise a local run, in this process or in a detached one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from hpcdist.config.schema import Config
from hpcdist.config.written import secrets_of
from hpcdist.files import retry
from hpcdist.files.atomic import write_json
from hpcdist.machine.own_image import image_facts
from hpcdist.run import snapshot
from hpcdist.run.folder import RunDir, State, read_record
from hpcdist.run.folder_identity import VARIABLE, identity
from hpcdist.run.lease import hold
from hpcdist.supervisor.local_launcher import LocalLauncher
from hpcdist.supervisor.plan import Plan
from hpcdist.supervisor.reporter import Reporter


def supervise(
    run: RunDir,
    config: Config,
    plan: Plan,
    view: Callable[[], AbstractContextManager[Reporter]],
    env: Mapping[str, str],
    *,
    tracking_uri: str,
) -> State:
    """Hold the run's lease and supervise the run until its end. Returns its last state.

    Args:
        view: returns the reporter; called when the parent of the ranks has begun to import torch.

    Raises:
        RunFolderError: another supervisor holds the run, or its folder is incomplete.
    """
    with retry.patient(retry.UNATTENDED_S), hold(run) as held:
        code = snapshot.code_state(run)
        facts = read_record(run.environment) or {}
        if facts | (image := image_facts(env)) != facts:  # first start in this image
            write_json(run.environment, facts | image)
        # The original working directory may not exist on another machine; the run folder holds the code.
        cwd = Path(code.cwd) if Path(code.cwd).is_dir() else run.path
        # Values are redacted in config.yaml; ranks read them from the environment.
        env = {**env, **secrets_of(config), VARIABLE: identity(run.path)}
        import_path = snapshot.import_path(code, run)
        fork = config.launch.fork and not config.trainer.script
        with (
            LocalLauncher(
                run,
                plan,
                env=env,
                import_path=import_path,
                cwd=cwd,
                fork=fork,
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
    """Start a supervisor that outlives this process and the terminal. Returns its process id."""
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
