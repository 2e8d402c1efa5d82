"""A real MLflow server that can be killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from hpcdist_runs import unused_port, wait_for


class Server:
    """An MLflow server of one worker.

    Args:
        root: folder of its log and its artifacts.
        database: its store, created if missing; by default `mlflow.db` in `root`.
        host: address to listen on.
    """

    def __init__(self, root: Path, database: Path | None = None, host: str = "127.0.0.1") -> None:
        self._root = root
        self._database = database or root / "mlflow.db"
        self._host = host
        self._port = unused_port()
        self.uri = f"http://{host}:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store = ["--backend-store-uri", f"sqlite:///{self._database}"]
        store += ["--artifacts-destination", f"{self._root}/artifacts"]
        with open(self._root / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "mlflow",
                    "server",
                    *store,
                    "--host",
                    self._host,
                    "--port",
                    str(self._port),
                    "--workers",
                    "1",
                ],
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for(self.answers, "the MLflow server to answer", timeout_s=120)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def kill(self) -> None:
        """Kill the server and its workers with SIGKILL."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            assert self._process.wait(30) == -signal.SIGKILL
            self._process = None
