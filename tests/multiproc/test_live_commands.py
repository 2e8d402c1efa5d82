"""Commands to a running run: `hpcdist save`, `hpcdist profile`, and the tag `hpcdist.command` in MLflow."""

from __future__ import annotations

import base64
import configparser
import gzip
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hpcdist_runs import HPCDIST, Runs, finish, unused_port, wait_for

from hpcdist.host.files import read_json

COMMANDS = "tracking.commands=[stop,save,profile]"
#: Limit of each wait: on a loaded machine, a pass of the shipper takes minutes.
PATIENCE_S = 600.0
#: Steps of at least 0.1 s, so that the ranks mostly wait, until a command ends the run.
LIVE = ("trainer=gated:train", "params.pace_s=0.1", "data.batch_size=16", "stop.max_epochs=100000", COMMANDS)


def events_of(trace: Path) -> list[dict[str, Any]]:
    with gzip.open(trace) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def profiled_steps(trace: Path) -> int:
    """Return the number of steps in a trace, and assert that it contains operators and collectives."""
    events = events_of(trace)
    names = {str(event.get("name")) for event in events}
    assert {"aten::addmm", "aten::convolution"} & names
    assert any("all_reduce" in name or "allreduce" in name for name in names)
    return len([event for event in events if str(event.get("name")).startswith("ProfilerStep#")])


def step_of(runs: Runs, name: str, rank: int = 0) -> int:
    return int((runs.attempt(name).read_beat(rank) or {}).get("step", 0))


def set_tag(database: Path, run_id: str, value: str) -> None:
    """Set the tag in a database, as MLflow's UI on it does."""
    code = (
        "import sys; from hpcdist.tracking.mlflow_client import open_client;"
        " open_client(sys.argv[1]).set_tag(sys.argv[2], 'hpcdist.command', sys.argv[3])"
    )
    subprocess.run([HPCDIST.with_name("python"), "-c", code, f"sqlite:///{database}", run_id, value], check=True)


@contextmanager
def live_run(runs: Runs, name: str, *overrides: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Start a run that a command must end; wait for its first steps and for its MLflow run."""
    process = runs.start("run", *runs.config(name, *LIVE, *overrides), **env)
    try:
        wait_for(lambda: process.poll() is not None or step_of(runs, name) > 2, "the first steps", timeout_s=PATIENCE_S)
        wait_for(
            lambda: process.poll() is not None or "run_id" in (read_json(runs.run_dir(name).mlflow) or {}),
            "the MLflow run",
            timeout_s=PATIENCE_S,
        )
        yield process
    finally:
        if process.poll() is None:
            runs.command("cancel", name)
            finish(process)


def test_running_run_saves_is_profiled_and_stops_by_tag(runs: Runs) -> None:
    with live_run(runs, "commands") as process:
        code, output = runs.command("save", "commands")
        assert code == 0, output
        words, path = output.strip().split(": ")[1:]
        assert (Path(path) / "manifest.json").is_file()
        assert words == f"saved step {int(path[-8:])}"

        code, output = runs.command("profile", "commands", "--steps", "3", "--ranks", "1,0")
        assert code == 0, output
        lines = [line.split(": ") for line in output.splitlines()]
        assert [line[0] for line in lines] == ["rank 0", "rank 1"]
        assert len({line[1] for line in lines}) == 1, "the ranks are profiled at the same steps"
        assert [profiled_steps(Path(line[2])) for line in lines] == [3, 3]

        code, output = runs.command("profile", "commands", "--ranks", "2")
        assert (code, output) == (2, "hpcdist: run commands has no rank 2: its ranks are 0 to 1\n")

        before = step_of(runs, "commands", 1)
        wait_for(lambda: step_of(runs, "commands", 1) > before, "steps after the profile", timeout_s=PATIENCE_S)
        set_tag(runs.database, runs.mlflow_id("commands"), "stop")
        code, output = finish(process)
        assert code == 0, output
        assert "stopped: everything saved (the tag hpcdist.command in MLflow)" in output
    tags = runs.tags("commands")
    assert "hpcdist.command" not in tags
    assert " UTC stop: commands will save and stop" in tags["hpcdist.command.result"]
    assert tags["hpcdist.command_line"].startswith("hpcdist run ddp_digits name=commands")
    assert runs.mlflow_status("commands") == "KILLED"
    folder = runs.artifacts("commands", "profiles")
    assert sorted(path.name for path in folder.rglob("*.gz")) == [Path(line[2]).name for line in lines]

    code, output = runs.command("profile", "commands")
    assert (code, output) == (2, "hpcdist: run commands is not running: its state is 'stopped'\n")


@dataclass(frozen=True)
class Account:
    """An account of the server, for direct requests."""

    address: str
    name: str
    password: str

    @classmethod
    def create(cls, folder: Path, address: str, name: str) -> Account:
        made = subprocess.run([HPCDIST, "server", "user", name, "--folder", folder], capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(folder / "users" / name)
        return cls(address, name, parser["mlflow"]["mlflow_tracking_password"])

    def send(self, method: str, path: str, **body: object) -> dict[str, Any]:
        pair = base64.b64encode(f"{self.name}:{self.password}".encode()).decode()
        headers = {"Authorization": f"Basic {pair}", "Content-Type": "application/json"}
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(f"{self.address}/api/{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.loads(answer.read() or b"{}")
        return found

    def command(self, run_id: str, value: str) -> None:
        self.send("POST", "2.0/mlflow/runs/set-tag", run_id=run_id, key="hpcdist.command", value=value)

    def tags(self, run_id: str) -> dict[str, str]:
        found = self.send("GET", f"2.0/mlflow/runs/get?run_id={run_id}")
        return {tag["key"]: tag["value"] for tag in found["run"]["data"]["tags"]}

    def result(self, run_id: str, begin: str, end: str = "") -> str:
        """Wait for the result of a command."""

        def found() -> str:
            text = self.tags(run_id).get("hpcdist.command.result", "").partition(" UTC ")[2]
            return text if text.startswith(begin) and end in text else ""

        return wait_for(found, f"the result of {begin}", timeout_s=PATIENCE_S)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """The folder and address of a server with accounts."""
    folder, port = tmp_path / "server", str(unused_port())
    options = ("--folder", str(folder), "--port", port, "--workers", "1", "--timeout", "600")
    done = subprocess.run([HPCDIST, "server", "up", *options], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    yield folder, f"http://127.0.0.1:{port}"
    subprocess.run([HPCDIST, "server", "down", "--folder", folder], check=True, capture_output=True)


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_commands_need_edit_permission_on_a_server(server: tuple[Path, str], runs: Runs) -> None:
    folder, address = server
    ada, bob = (Account.create(folder, address, name) for name in ("ada", "bob"))
    env = {"MLFLOW_TRACKING_USERNAME": ada.name, "MLFLOW_TRACKING_PASSWORD": ada.password}
    with live_run(runs, "guarded", f"tracking.uri={address}", **env) as process:
        run_id = runs.mlflow_id("guarded")
        wait_for(lambda: "hpcdist.state" in bob.tags(run_id), "the tags of the run", timeout_s=PATIENCE_S)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            bob.command(run_id, "stop")
        experiment = bob.send("GET", f"2.0/mlflow/runs/get?run_id={run_id}")["run"]["info"]["experiment_id"]
        grant = {"resource_type": "experiment", "resource_id": experiment, "permission": "EDIT"}
        ada.send("POST", "3.0/mlflow/users/permissions/grant", username="bob", **grant)

        bob.command(run_id, "save")
        assert ": saved step " in bob.result(run_id, "save: ", "saved")
        bob.command(run_id, "profile steps=2 ranks=1")
        trace = bob.result(run_id, "profile steps=2 ranks=1: ", "profiled").rpartition(": ")[2]
        assert profiled_steps(runs.run_dir("guarded").path / trace) == 2
        bob.command(run_id, "profile ranks=7")
        refused = "profile ranks=7: refused: run guarded has no rank 7: its ranks are 0 to 1"
        assert bob.result(run_id, "profile ranks=7") == refused
        bob.command(run_id, "stop")
        code, output = finish(process)
        assert code == 0, output
        assert "stopped: everything saved (the tag hpcdist.command in MLflow)" in output
        artifacts = bob.send(
            "GET", f"2.0/mlflow/artifacts/list?run_id={run_id}&path={os.path.dirname(trace).removeprefix('artifacts/')}"
        )
        assert [Path(item["path"]).name for item in artifacts["files"]] == [Path(trace).name]
