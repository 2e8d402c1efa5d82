"""`hpcdist run --like RUN`, `submit --like RUN` and `rerun RUN`, with a supervisor that starts no ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, Make, Seen, one_line

from hpcdist.host.json_files import read_json, write_json
from hpcdist.review.facts import read_facts
from hpcdist.run.folder import RunDir, State
from hpcdist.supervisor import local_launcher
from hpcdist.tracking.journal import JournalWriter
from hpcdist.tracking.run_tags import fixed_tags, read_config

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

LOSSES = [1.0, 0.5, 0.25]


def log(run: RunDir, losses: list[float]) -> None:
    with JournalWriter(run.journal) as journal:
        for step, loss in enumerate(losses, 1):
            journal.log({"train/loss": loss, "train/samples_per_s": loss}, step)


@pytest.fixture
def first(make: Make, tmp_path: Path) -> RunDir:
    """A finished run of the user's own trainer; its code has changed since."""
    (tmp_path / "mine.py").write_text("VERSION = 1\ndef train(ctx, cfg): ...\n")
    run = make("first", "trainer=mine:train", "seed=3", "launch.num_ranks=1", status="finished", attempt=1)
    run.patch.write_text("+x\n")
    log(run, LOSSES)
    (tmp_path / "mine.py").write_text("VERSION = 2\ndef train(ctx, cfg): ...\n")
    return run


@pytest.fixture
def trains(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Replace the supervisor: it logs `losses` and ends with `state`."""
    seen: Seen = {"losses": LOSSES, "state": State(status="finished", attempt=1)}

    def supervise_locally(run: RunDir, config: Any, plan: Any, report: Any, env: Any, *, tracking_uri: str) -> State:
        seen.update(run=run, config=config)
        run.new_attempt()
        log(run, seen["losses"])
        run.write_state(seen["state"])
        state: State = seen["state"]
        return state

    monkeypatch.setattr(local_launcher, "supervise_locally", supervise_locally)
    monkeypatch.setattr("hpcdist.host.log_files.configure", lambda: None)
    return seen


def test_run_like_another_has_its_config_and_code(hpcdist: Cli, first: RunDir, trains: Seen) -> None:
    write_json(first.mlflow, {"run_id": "0a1b"})
    result = hpcdist("run", "--like", "first", "optim.lr=0.5")
    assert (result.code, result.err) == (0, "")
    made, config = trains["run"], trains["config"]
    assert made.path.parent == first.path.parent
    assert made.name != "first"
    assert (config.seed, config.optim.lr, config.name) == (3, 0.5, made.name)
    assert (made.code / "mine.py").read_text() == (first.code / "mine.py").read_text()
    assert made.patch.read_text() == "+x\n"
    assert (read_json(made.environment) or {})["code"] == (read_json(first.environment) or {})["code"]
    facts = read_facts(made)
    assert (facts.like, facts.like_run_id) == ("exp/first", "0a1b")
    tags = fixed_tags(made, read_config(made))
    assert (tags["hpcdist.like.run"], tags["hpcdist.like.run_id"]) == ("exp/first", "0a1b")


def test_name_and_dry_run_of_a_run_like_another(hpcdist: Cli, first: RunDir, trains: Seen) -> None:
    assert "exp/again" in hpcdist("run", "--like", str(first.path), "name=again", "--dry-run").out
    assert [path.name for path in first.path.parent.iterdir()] == ["first"]
    assert hpcdist("run", "--like", str(first.path), "name=again").code == 0
    assert trains["run"].name == "again"


def test_secrets_come_from_the_folder_or_environment(
    hpcdist: Cli, make: Make, trains: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make("first", "trainer=ddp", "launch.env.A_TOKEN=s3cret", status="stopped")
    assert hpcdist("run", "--like", "first").code == 0
    assert trains["config"].launch.env == {"A_TOKEN": "s3cret"}
    run.secrets.unlink()
    assert "A_TOKEN" in one_line(hpcdist("run", "--like", "first"))
    monkeypatch.setenv("A_TOKEN", "other")
    assert hpcdist("run", "--like", "first").code == 0
    assert trains["config"].launch.env == {"A_TOKEN": "other"}


def test_script_runs_from_the_copy_after_its_removal(hpcdist: Cli, make: Make, trains: Seen, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    run = make("script", f"trainer={{script: [{script}]}}", status="finished")
    script.unlink()
    assert hpcdist("run", "--like", "script").code == 0
    assert trains["run"].snapshot_of(script) == trains["run"].code / "train.py"
    (run.code / "train.py").unlink()
    before = sorted(run.path.parent.iterdir())
    assert one_line(hpcdist("run", "--like", "script")) == f"trainer.script: no such file: {script}"
    assert sorted(run.path.parent.iterdir()) == before, "no folder remains"


def test_submit_like_another_run(hpcdist: Cli, first: RunDir) -> None:
    result = hpcdist("submit", "--like", "first", "cluster.nodes=3", "cluster.partition=cpu", "--dry-run")
    assert result.code == 0, result.err
    assert "#SBATCH --nodes=3" in result.out


def test_rerun_compares_each_logged_value(hpcdist: Cli, first: RunDir, trains: Seen) -> None:
    result = hpcdist("rerun", "first")
    assert (result.code, result.err) == (0, "")
    new = trains["run"].name
    assert result.out.splitlines()[-1] == f"{new}: no value differs: 3 values of 1 metric at 3 steps"
    trains["losses"] = [1.0, 0.5, 0.125]
    result = hpcdist("rerun", "first", "seed=4")
    assert result.code == 1
    assert trains["config"].seed == 4
    difference = "the first difference is at step 3: train/loss was 0.25, is 0.125; 1 of 3 values of 1 metric"
    assert result.out.splitlines()[-1] == f"{trains['run'].name}: {difference} at 3 steps differ"
    values = json.loads(hpcdist("compare", "first", trains["run"].name, "--json").out)["values"]
    assert values[trains["run"].name]["equal"] is False
    trains["state"] = State(status="failed", reason="rank 1 was killed", attempt=1)
    result = hpcdist("rerun", "first")
    assert (result.code, result.out.splitlines()[-1]) == (1, "failed: rank 1 was killed")


def test_user_errors_are_one_line(hpcdist: Cli, first: RunDir, trains: Seen) -> None:
    for command in ("run --like", "submit --like", "rerun"):
        assert one_line(hpcdist(*command.split(), "none")).startswith("no run 'none' under ")
    for options in ("--sweep seed=1,2", "--repeat 2", "--in podman"):
        message = one_line(hpcdist("run", "--like", "first", *options.split()))
        assert message.startswith(f"--like and {options.split()[0]} exclude each other: ")
    assert "--like and --cluster exclude" in one_line(hpcdist("submit", "--like", "first", "--cluster", "devcluster"))
    assert one_line(hpcdist("run")).startswith("CONFIG is missing: shipped configs are ")
    assert "'train.py' is not an override" in one_line(hpcdist("run", "--like", "first", "train.py"))
    first.code.rename(first.path / "moved")
    assert one_line(hpcdist("rerun", "first")).startswith("the copy of the code of run first is gone: ")
    first.path.chmod(0o777)
    assert "is writable by group or others" in one_line(hpcdist("rerun", "first"))


def test_values_that_refer_to_a_changed_key_follow_it(hpcdist: Cli, tmp_path: Path, trains: Seen) -> None:
    script = tmp_path / "train.py"
    script.touch()
    (tmp_path / "script.yaml").write_text(
        "trainer: {script: [train.py, --lr, '${params.lr}', --text, 'cost: $5', --seed, '${seed}']}\n"
        "params: {lr: 1e-4}\nlaunch: {num_ranks: 1, env: {LR: '${params.lr}'}}\n"
    )

    def command(lr: str, seed: int) -> list[str]:
        return [str(script), "--lr", lr, "--text", "cost: $5", "--seed", str(seed)]

    result = hpcdist("run", "script.yaml", "name=first", "seed=3")
    assert "without effect" not in result.out, "the arguments of the script refer to it"
    assert trains["config"].trainer.script == command("0.0001", 3)
    assert hpcdist("run", "--like", "first", "params.lr=0.5").code == 0
    assert trains["config"].trainer.script == command("0.5", 3)
    assert trains["config"].launch.env == {"LR": "0.5"}
    copied = trains["run"].name
    assert hpcdist("run", "--like", copied, "seed=4", "launch.env.LR=x").code == 0
    assert trains["config"].trainer.script == command("0.5", 4)
    assert trains["config"].launch.env == {"LR": "x"}

    run = trains["run"]
    run.write_state(State(status="failed", attempt=1))
    assert hpcdist("resume", run.name, "params.lr=0.25").code == 0
    assert trains["config"].trainer.script == command("0.25", 4)
    assert trains["config"].launch.env == {"LR": "x"}, "an override has replaced the reference"
    assert hpcdist("resume", run.name, "trainer.script=[train.py, -v]").code == 0
    assert hpcdist("resume", run.name, "params.lr=0.75").code == 0
    assert trains["config"].trainer.script == [str(script), "-v"]
