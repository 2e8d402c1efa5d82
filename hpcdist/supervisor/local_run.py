"""Supervise a local run, in this process or in a detached one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hpcdist.config.schema import Config
from hpcdist.config.written import secrets_of
from hpcdist.files import retry
from hpcdist.files.atomic import write_json
from hpcdist.machine.own_image import image_facts
from hpcdist.run import snapshot
from hpcdist.run.folder import RunDir, State, read_record
from hpcdist.run.lease import hold
from hpcdist.supervisor.local_launcher import LocalLauncher
from hpcdist.supervisor.plan import Plan
from hpcdist.supervisor.reporter import Reporter
from hpcdist.supervisor.supervisor import Supervisor


def supervise(
    run: RunDir, config: Config, plan: Plan, report: Reporter, env: Mapping[str, str], *, tracking_uri: str
) -> State:
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
        with LocalLauncher(run, plan, env=env, import_path=import_path, cwd=cwd) as launcher:
            supervisor = Supervisor(
                run, config, launcher, report, tracking_uri=tracking_uri, env=env, check_lease=held.check
            )
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
