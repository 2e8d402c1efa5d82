"""Commands to a running run: `hpcdist save`, `hpcdist profile`, and the tag `hpcdist.command` in MLflow."""

import gzip
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from hpcdist_runs import HPCDIST, Runs, assert_equals_control, finish, wait_for
from http_servers import AccountServer
from postgres_cluster import postgres_cluster
from spawn import Rank, spawn_ranks

from hpcdist.host.json_files import read_json
from hpcdist.rank.processes import StopFlag
from hpcdist.rank.stopping import StopAgreement
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.run.rank_requests import RequestReader

COMMANDS = "tracking.commands=[stop,save,profile]"
#: Limit of each wait: on a loaded machine, a pass of the shipper takes minutes.
PATIENCE_S = 600.0
#: Steps of at least 0.4 s, so that the ranks mostly wait, until a command ends the run.
LIVE = ("trainer=gated:train", "params.pace_s=0.4", "data.batch_size=16", "stop.max_epochs=100000", COMMANDS)


def profiled_steps(trace: Path) -> int:
    """Return the number of steps in a trace, and assert that it contains operators and collectives."""
    with gzip.open(trace) as file:
        names = [str(event.get("name")) for event in json.load(file)["traceEvents"]]
    assert {"aten::addmm", "aten::convolution"} & set(names)
    assert any("all_reduce" in name or "allreduce" in name for name in names)
    return len([name for name in names if name.startswith("ProfilerStep#")])


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
        wait_for(lambda: process.poll() is not None or runs.step(name) > 2, "the first steps", timeout_s=PATIENCE_S)
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

        before = runs.step("commands", rank=1)
        wait_for(lambda: runs.step("commands", rank=1) > before, "steps after the profile", timeout_s=PATIENCE_S)
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


def hpcdist(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HPCDIST, *arguments], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_run_arrives_once_after_its_password_is_corrected(tmp_path: Path, runs_dir: Path) -> None:
    create = re.search(r"```python\n(.*?)```", AccountServer.PAGE.read_text(), re.DOTALL)
    assert create is not None
    with postgres_cluster() as cluster, AccountServer(tmp_path, cluster.create_database()) as server:
        address = server.uri
        code = textwrap.dedent(create[1]).replace("http://127.0.0.1:5000", address)
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **server.ADMIN}, check=True)
        saved = tmp_path / "home" / ".mlflow" / "credentials"
        saved.parent.mkdir(parents=True)
        saved.touch(mode=0o600)
        text = "[mlflow]\nmlflow_tracking_username = ada\nmlflow_tracking_password = "
        saved.write_text(f"{text}wrong\n")
        env = {"HOME": f"{tmp_path}/home", "HPCDIST_RUNS_DIR": str(runs_dir), "MLFLOW_TRACKING_URI": address}
        overrides = ("name=first", "stop.max_epochs=1", "launch.num_ranks=1", "tracking.drain_timeout_s=1")
        run = hpcdist("run", "ddp_digits", *overrides, cwd=tmp_path, **env)
        assert run.returncode == 0, run.stdout + run.stderr
        failed = hpcdist("sync", cwd=tmp_path, **env)
        refused = "the server does not accept user ada with this password (401)"
        assert (failed.returncode, failed.stderr) == (1, f"first: MLflow at {address}: {refused}: check {saved}\n")
        saved.write_text(f"{text}a long password\n")
        for _ in range(2):
            done = hpcdist("sync", cwd=tmp_path, **env)
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


# --- StopAgreement: all ranks stop at the same step, whichever rank gets the request; with a dead peer, no rank saves.


REQUEST_AT = 6


def train_until_stopped(stop: StopAgreement, act: Callable[[int], None], *, pace: int = 1) -> int | None:
    """Step until the ranks agree to stop. Returns the number of steps, or None if they do not agree in time."""
    weights = torch.rand(40, 40)
    until = time.monotonic() + 120
    for step in itertools.count(1):
        for _ in range(pace):
            weights = torch.tanh(weights @ weights)
        act(step)
        if stop.at_boundary():
            assert stop.agreed
            assert stop.at_boundary(), "an agreed stop is not revoked"
            return step
        if time.monotonic() > until:
            break
    return None


def _installed() -> StopFlag:
    flag = StopFlag()
    flag.install()
    return flag


def stop_scenarios(here: Rank) -> dict[str, int | None]:
    """Return the step at which this rank stopped in each scenario."""
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    attempts = [Attempt(here.folder / name) for name in ("001", "002")]
    for attempt in attempts:
        attempt.path.mkdir(exist_ok=True)
    stopped: dict[str, int | None] = {}

    def scenario(name: str, target: int, act: Callable[[], object], at: int = REQUEST_AT) -> None:
        def act_once(step: int) -> None:
            if step == at and here.rank == target:
                act()

        dist.barrier()  # scenarios begin together; the ranks have different step times
        flag = _installed()
        act_once(0)
        attempt = attempts[name == "request"]
        stop = StopAgreement(group, flag, RequestReader(attempt) if here.rank == 0 else None)
        stopped[name] = train_until_stopped(stop, act_once, pace=1 + here.rank)
        stop.close()

    for number in (signal.SIGTERM, signal.SIGUSR2):
        for target in range(here.world_size):
            scenario(f"{number.name} to rank {target}", target, partial(os.kill, os.getpid(), number))
    scenario("request", 1, partial(attempts[1].request.write_text, "{}"))  # rank 0 reads it
    scenario("before the first step", here.world_size - 1, partial(os.kill, os.getpid(), signal.SIGTERM), at=0)
    return stopped


def test_all_ranks_stop_at_the_same_step() -> None:
    by_rank = spawn_ranks(stop_scenarios, 3)
    assert len(by_rank[0]) == 8
    for name, step in by_rank[0].items():
        assert step is not None, f"{name}: no agreement"
        assert [other[name] for other in by_rank] == [step] * 3, name
    first = by_rank[0].pop("before the first step")
    assert first == 2, "the first exchange"
    assert all(step > REQUEST_AT for step in by_rank[0].values())


def peer_dies(here: Rank) -> str:
    """Return the error of a surviving rank; empty if it would have saved."""
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    flag = _installed()

    def act(step: int) -> None:
        if step == REQUEST_AT:
            # As with `srun --kill-on-bad-exit`: one rank has died, and the others get SIGTERM.
            os.kill(os.getpid(), signal.SIGKILL if here.rank == 2 else signal.SIGTERM)

    stop = StopAgreement(group, flag, None)
    try:
        train_until_stopped(stop, act)
    except RuntimeError as error:
        assert not stop.agreed
        return str(error)
    return ""


def test_no_rank_saves_after_the_death_of_a_peer() -> None:
    for message in spawn_ranks(peer_dies, 3, killed=[2])[:2]:
        assert "Connection" in message or "closed" in message


# --- `hpcdist rerun` with real ranks.


def test_rerun_repeats_every_value_and_names_the_run(runs: Runs, control_run: str) -> None:
    code, output = runs.command("rerun", control_run)
    assert code == 0, output
    name, _, result = output.splitlines()[-1].partition(": ")
    assert re.fullmatch(r"no value differs: [1-9][\d,]+ values of 6 metrics at [1-9]\d+ steps", result), output
    assert_equals_control(runs, name, control_run)
    original = runs.mlflow_id(control_run)
    tags = runs.tags(name)
    assert tags["hpcdist.like.run_id"] == original
    note = tags["mlflow.note.content"].replace("\\", "")
    assert f"{control_run} (MLflow run {original})" in note, note
