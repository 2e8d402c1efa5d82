"""A real MLflow server for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from hpcdist_runs import closed_port, wait_for


class Server:
    """A real MLflow server on `mlflow.db` in a folder, which can be killed and started again."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._port = closed_port()
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store = ["--backend-store-uri", f"sqlite:///{self._root}/mlflow.db"]
        store += ["--artifacts-destination", f"{self._root}/artifacts"]
        with open(self._root / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *store, "--host", "127.0.0.1", "--port", str(self._port)],
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for(self._answers, "the MLflow server to answer", timeout_s=120)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def kill(self) -> None:
        """SIGKILL to it and its workers."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            assert self._process.wait(30) == -signal.SIGKILL
            self._process = None
