"""The config of a resume that changes keys: kept beside the old one until a step has shown that it works.

`config.next.yaml` is what ranks read while it exists. The supervisor makes it `config.yaml` when the first step of the
new attempt is completed, and removes it when the run fails before that; a run that is stopped keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcdist.config.schema import Config, find_trainer
from hpcdist.config.tree import leaves
from hpcdist.config.written import plain_tree, redacted, run_yaml, secrets_of
from hpcdist.errors import ConfigError, HpcdistError
from hpcdist.files import retry
from hpcdist.run import secret_file
from hpcdist.run.folder import Attempt, RunDir, State, read_json, sync_folder, write_atomic
from hpcdist.supervisor.launcher import Reporter
from hpcdist.supervisor.restart_policy import Failure

_SHOWN_KEYS = 3


def newest_step(run: RunDir) -> int | None:
    """The step of the newest checkpoint that has a manifest, None without one; its content is not verified."""
    steps = []
    found = retry.retry(lambda: list(run.checkpoints.glob("step-*/manifest.json")), run.checkpoints)
    for path in found:
        step = (read_json(path) or {}).get("step")
        if type(step) is int:
            steps.append(step)
    return max(steps, default=None)


def check(run: RunDir, config: Config) -> None:
    """Raise ConfigError, before anything is written, for changes that the run's checkpoint cannot go on with."""
    step = newest_step(run)
    if step is None:
        return
    before, after = _flat(plain_tree(run.config)), _flat_config(config)
    target, new_target = before.get("trainer.target"), after["trainer.target"]
    trainer = find_trainer(str(target))
    if config.trainer.script or trainer is None or not trainer.fixed_keys:
        return
    fixed = ("trainer.target", *trainer.fixed_keys) if target == new_target else ("trainer.target",)
    problems = [
        f"{key} was {before.get(key)!r} when the checkpoint of step {step} was written and cannot be {after.get(key)!r}"
        " now: leave it out, or start a new run"
        for key in _differing(before, after)
        if any(key == one or key.startswith(f"{one}.") for one in fixed)
    ]
    if problems:
        raise ConfigError(problems, f"resume {run.name}")


def propose(run: RunDir, config: Config) -> None:
    """Make `config` what the next attempt uses; `config.yaml` stays until that has completed a step.

    Hold the run's lease around this. A run without any attempt has no config that is known to work: it is replaced.
    """
    # The config before may need its own ones again.
    secret_file.keep(run, {**secret_file.kept(run), **secrets_of(config)})
    text = run_yaml(config)
    if _flat(plain_tree(run.config)) == _flat_config(config):
        drop(run)
    elif run.read_state().attempt == 0:
        write_atomic(run.config, text, durable=True)
        drop(run)
    else:
        write_atomic(run.next_config, text, durable=True)


def drop(run: RunDir) -> None:
    """Go on with `config.yaml`."""
    retry.remove(run.next_config)


def settle(run: RunDir, state: State, first_step: int) -> State:
    """Decide on a pending config at the end of a run's attempts; returns the state, with a sentence about it.

    Args:
        first_step: the step that the last attempt began at.
    """
    if not retry.exists(run.next_config):
        return state
    beat = run.attempt(state.attempt).last_beat(0) or {}
    if state.status == "finished" or beat.get("step", 0) > first_step:
        _adopt(run)
    elif state.status == "failed":
        keys = _changed(run)
        drop(run)
        return replace(
            state,
            reason=f"{state.reason}; config.yaml is as it was before the resume, since no step was completed with the"
            f" changed {keys}",
        )
    return state


def _adopt(run: RunDir) -> None:
    retry.rename(run.next_config, run.config)
    retry.retry(lambda: sync_folder(run.path), run.path)


def _changed(run: RunDir) -> str:
    try:
        keys = _differing(_flat(plain_tree(run.config)), _flat(plain_tree(run.next_config)))
    except HpcdistError:
        keys = []
    return ", ".join(keys[:_SHOWN_KEYS]) + (" …" if len(keys) > _SHOWN_KEYS else "") or "config"


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {".".join(path): value for path, value in leaves(tree)}


def _flat_config(config: Config) -> dict[str, Any]:
    return _flat(redacted(config))


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in {*before, *after} if before.get(key) != after.get(key))


class AdoptingReporter:
    """Passes on all that a reporter is told, and adopts the pending config at the first completed step.

    A plain script has no steps: its first output counts as one.
    """

    def __init__(self, run: RunDir, report: Reporter) -> None:
        self._run = run
        self._report = report
        self._pending = run.next_config.is_file()
        self.first_step = newest_step(run) or 0

    def attempt(self, attempt: Attempt, num_ranks: int) -> None:
        self.first_step = newest_step(self._run) or 0
        self._report.attempt(attempt, num_ranks)

    def progress(self, beat: Mapping[str, Any]) -> None:
        self._progressed(beat.get("step", 0) > self.first_step)
        self._report.progress(beat)

    def note(self, text: str) -> None:
        self._report.note(text)

    def output(self, text: str) -> None:
        self._progressed(True)
        self._report.output(text)

    def failure(self, failure: Failure, log: Path) -> None:
        self._report.failure(failure, log)

    def _progressed(self, has_step: bool) -> None:
        if self._pending and has_step:
            _adopt(self._run)
            self._pending = False
