"""A run that logs to MLflow's server with accounts on PostgreSQL, as docs/how-to/mlflow-server.md starts it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import pytest
from hpcdist_runs import HPCDIST, unused_port, wait_for
from postgres_cluster import postgres_cluster

from hpcdist.run.folder import RunDir

#: A minute: `make faults` runs it.
pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "mlflow-server.md"


def answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def hpcdist(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HPCDIST, *arguments], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def test_run_with_a_wrong_password_arrives_once_after_its_correction(tmp_path: Path, runs_dir: Path) -> None:
    settings = re.search(r"```ini\n(# basic_auth.ini.*?)```", PAGE.read_text(), re.DOTALL)
    start = re.search(r"mlflow server --app-name .*", PAGE.read_text())
    create = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert settings is not None
    assert create is not None
    assert start is not None
    port = str(unused_port())
    address = f"http://127.0.0.1:{port}"
    with postgres_cluster() as cluster:
        store = cluster.create_database()
        ini = tmp_path / "basic_auth.ini"
        ini.write_text(settings[1].replace("postgresql+psycopg2://mlflow@/mlflow", store.replace("%", "%%")))
        options = start[0].replace("$PWD", str(tmp_path)).replace("5000", port).split()[1:]
        with open(tmp_path / "server.log", "wb") as log:
            server = subprocess.Popen(
                [sys.executable, "-m", "mlflow", *options, "--workers", "1"],
                env={
                    **os.environ,
                    "MLFLOW_AUTH_CONFIG_PATH": str(ini),
                    "MLFLOW_BACKEND_STORE_URI": store,
                    "MLFLOW_AUTH_ADMIN_PASSWORD": "of the administrator",
                    "MLFLOW_FLASK_SERVER_SECRET_KEY": "of the server",
                    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            wait_for(lambda: answers(address), "the server to answer", timeout_s=600)
            admin = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": "of the administrator"}
            code = textwrap.dedent(create[1]).replace("http://127.0.0.1:5000", address)
            subprocess.run([sys.executable, "-c", code], env={**os.environ, **admin}, check=True)
            saved = tmp_path / "home" / ".mlflow" / "credentials"
            saved.parent.mkdir(parents=True)
            saved.touch(mode=0o600)
            text = "[mlflow]\nmlflow_tracking_username = ada\nmlflow_tracking_password = "
            saved.write_text(f"{text}wrong\n")
            env = {"HOME": f"{tmp_path}/home", "HPCDIST_RUNS_DIR": str(runs_dir), "MLFLOW_TRACKING_URI": address}
            overrides = ("name=first", "stop.max_epochs=1", "launch.num_ranks=1", "tracking.drain_timeout_s=1")
            run = hpcdist("run", "ddp_digits", *overrides, cwd=tmp_path, **env)
            assert run.returncode == 0, run.stdout + run.stderr
            failed = hpcdist("sync", "--all", cwd=tmp_path, **env)
            refused = "the server does not accept user ada with this password (401)"
            assert (failed.returncode, failed.stderr) == (1, f"first: MLflow at {address}: {refused}: check {saved}\n")
            saved.write_text(f"{text}a long password\n")
            for _ in range(2):
                done = hpcdist("sync", "--all", cwd=tmp_path, **env)
                assert done.returncode == 0, done.stdout + done.stderr
            folder = RunDir.open(runs_dir / "digits" / "first")
            run_id = json.loads(folder.mlflow.read_text())["run_id"]
            where = f"where run_uuid = '{run_id}'"
            rows, points = (
                cluster.sql(f"select {what} from metrics {where}", "mlflow")
                for what in ("count(*)", "count(distinct (key, step))")
            )
            assert int(rows) == int(points) > 20
            assert cluster.sql(f"select status from runs {where}", "mlflow") == "FINISHED"
            assert [*tmp_path.glob(f"artifacts/*/{run_id}/artifacts/config.yaml")]
            files = [path for path in folder.path.rglob("*") if path.is_file()]
            assert not [path for path in files if b"a long password" in path.read_bytes()]
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(60)
