"""The changed config of a resume: adopted at the first completed step, discarded if the run fails before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.schema import Config
from hpcdist.config.written import run_yaml
from hpcdist.errors import ConfigError
from hpcdist.host.files import write_json
from hpcdist.run import records
from hpcdist.run.folder import Attempt, RunDir, State, Status
from hpcdist.supervisor.progress import AdoptingReporter
from hpcdist.supervisor.restart_policy import Failure


class SilentReporter:
    def attempt(self, attempt: Attempt, num_ranks: int) -> None: ...
    def progress(self, beat: Mapping[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def output(self, text: str) -> None: ...
    def failure(self, failure: Failure, log: Path) -> None: ...


@pytest.fixture
def run(runs_dir: Path) -> RunDir:
    run = RunDir.create(runs_dir / "exp" / "first")
    run.config.write_text(run_yaml(config(runs_dir)))
    attempt = run.new_attempt()
    checkpoint = run.checkpoints / "step-00000040"
    checkpoint.mkdir()
    write_json(checkpoint / "manifest.json", {"step": 40})
    write_json(attempt.beat(0), beat(40))
    run.write_state(replace(run.read_state(), status="stopped", attempt=1))
    return run


def config(runs_dir: Path, *overrides: str) -> Config:
    return load_config("ddp_digits", [f"runs_dir={runs_dir}", "name=first", *overrides])


def beat(step: int) -> dict[str, Any]:
    return {"time": 1.0, "step": step, "total_steps": 90, "metrics": {}}


def lr(path: Path) -> float:
    return float(yaml.safe_load(path.read_text())["optim"]["lr"])


def ended(run: RunDir, status: Status) -> State:
    return replace(run.read_state(), status=status, reason="rank 0 failed")


def test_config_is_adopted_at_the_first_completed_step(run: RunDir, runs_dir: Path) -> None:
    records.propose(run, config(runs_dir, "optim.lr=0.5"))
    assert (lr(run.config), lr(run.effective_config)) == (0.002, 0.5)
    report = AdoptingReporter(run, SilentReporter())
    report.attempt(run.new_attempt(), 2)
    report.progress(beat(0))
    report.progress(beat(40))
    assert lr(run.config) == 0.002, "restored, but no step completed"
    report.progress(beat(41))
    assert lr(run.config) == 0.5
    assert not run.next_config.exists()


def test_failure_before_the_first_step_discards_the_change(run: RunDir, runs_dir: Path) -> None:
    records.propose(run, config(runs_dir, "optim.lr=0.5", "data.batch_size=7"))
    state = records.settle(run, ended(run, "failed"), 40)
    assert state.reason == (
        "rank 0 failed; config.yaml was restored, because no step was completed with the changed"
        " data.batch_size, optim.lr"
    )
    assert lr(run.effective_config) == 0.002


def test_stop_before_the_first_step_keeps_the_pending_config(run: RunDir, runs_dir: Path) -> None:
    records.propose(run, config(runs_dir, "optim.lr=0.5"))
    assert records.settle(run, ended(run, "stopped"), 40).reason == "rank 0 failed"
    assert (lr(run.config), lr(run.effective_config)) == (0.002, 0.5)


@pytest.mark.parametrize(("status", "step"), [("finished", 40), ("failed", 41), ("stopped", 41)])
def test_unreported_step_adopts_the_config_at_the_end(run: RunDir, runs_dir: Path, status: Status, step: int) -> None:
    records.propose(run, config(runs_dir, "optim.lr=0.5"))
    write_json(run.attempt(1).beat(0), beat(step))
    assert records.settle(run, ended(run, status), 40).reason == "rank 0 failed"
    assert lr(run.config) == 0.5


def test_output_of_a_plain_script_counts_as_a_step(run: RunDir, runs_dir: Path) -> None:
    records.propose(run, config(runs_dir, "optim.lr=0.5"))
    AdoptingReporter(run, SilentReporter(), is_script=True).output("epoch 1\n")
    assert lr(run.config) == 0.5


def test_unchanged_config_and_run_without_attempts_have_no_pending_config(run: RunDir, runs_dir: Path) -> None:
    records.propose(run, config(runs_dir, "optim.lr=0.5"))
    records.propose(run, config(runs_dir))
    assert not run.next_config.exists()
    run.write_state(replace(run.read_state(), attempt=0))
    records.propose(run, config(runs_dir, "optim.lr=0.5"))
    assert lr(run.config) == 0.5
    assert not run.next_config.exists()


def test_change_incompatible_with_the_checkpoint_is_an_error(run: RunDir, runs_dir: Path) -> None:
    changed = config(runs_dir, "model.name=resnet18", "optim.name=sgd", "optim.lr=0.5")
    with pytest.raises(ConfigError) as found:
        records.check(run, changed)
    assert found.value.problems == (
        "model.name was 'simple_cnn' when the checkpoint of step 40 was written and cannot be 'resnet18' now: leave it"
        " out, or start a new run",
        "optim.name was 'adam' when the checkpoint of step 40 was written and cannot be 'sgd' now: leave it out, or"
        " start a new run",
    )
    records.check(run, config(runs_dir, "optim.lr=0.5", "stop.max_epochs=20"))
    (run.checkpoints / "step-00000040" / "manifest.json").unlink()
    records.check(run, changed)


# --- interpolations


def test_text_like_an_interpolation_survives_the_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VICTIM_SECRET", "hunter2")
    path = tmp_path / "config.yaml"
    first = load_config("ddp_digits", [r"params.text='\${oc.env:VICTIM_SECRET}'"])
    assert first.params == {"text": "${oc.env:VICTIM_SECRET}"}
    path.write_text(run_yaml(first))
    assert load_run_config(path, [], {}) == first
    changed = load_run_config(path, ["optim.lr=0.5", "experiment=${oc.env:VICTIM_SECRET}"], {})
    assert changed.params == first.params
    assert changed.experiment == "hunter2", "an override is resolved once"


@pytest.mark.parametrize("text", ["${oc.env:VICTIM_SECRET}", "${", "${nowhere}", "x ${seed} }"])
def test_interpolation_in_a_run_config_is_never_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Also in a file that hpcdist has not written."""
    monkeypatch.setenv("VICTIM_SECRET", "hunter2")
    path = tmp_path / "config.yaml"
    path.write_text(f"experiment: digits\ntracking: {{uri: 'http://evil/{text}'}}\n")
    for overrides in ([], ["seed=3"]):
        assert load_run_config(path, overrides, {}, require_secrets=False).tracking.uri == f"http://evil/{text}"
