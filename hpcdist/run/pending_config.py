"""The changed config of a resume, kept beside the old one until the first step is completed with it.

Ranks read `config.next.yaml` if it exists. The supervisor renames it to `config.yaml` after the first completed step,
and removes it if the run fails before. A stopped run keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpcdist.config.schema import Config, find_trainer
from hpcdist.config.tree import flat
from hpcdist.config.written import flat_values, plain_tree, run_yaml, secrets_of
from hpcdist.errors import ConfigError, HpcdistError
from hpcdist.files import retry
from hpcdist.files.atomic import fsync_folder, write_atomic
from hpcdist.run import secret_file
from hpcdist.run.folder import RunDir, State
from hpcdist.run.saved_checkpoints import newest_step

_SHOWN_KEYS = 3


def check(run: RunDir, config: Config) -> None:
    """Raise ConfigError for changes that are incompatible with the run's checkpoint, before anything is written."""
    step = newest_step(run)
    if step is None:
        return
    before, after = flat(plain_tree(run.config)), flat_values(config)
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
    """Make `config` the config of the next attempt; `config.yaml` stays until that attempt has completed a step.

    The caller holds the run's lease. In a run without attempts, `config.yaml` is replaced at once.
    """
    # The secrets of the old config may be needed again.
    secret_file.keep(run, {**secret_file.kept(run), **secrets_of(config)})
    text = run_yaml(config)
    if flat(plain_tree(run.config)) == flat_values(config):
        drop(run)
    elif run.read_state().attempt == 0:
        write_atomic(run.config, text, durable=True)
        drop(run)
    else:
        write_atomic(run.next_config, text, durable=True)


def drop(run: RunDir) -> None:
    """Discard the pending config."""
    retry.remove(run.next_config)


def settle(run: RunDir, state: State, first_step: int) -> State:
    """Adopt or discard a pending config after the last attempt. Returns the state, with a reason if discarded.

    Args:
        first_step: step at which the last attempt began.
    """
    if not retry.exists(run.next_config):
        return state
    beat = run.attempt(state.attempt).read_beat(0) or {}
    if state.status == "finished" or beat.get("step", 0) > first_step:
        adopt(run)
    elif state.status == "failed":
        keys = _changed(run)
        drop(run)
        return replace(
            state,
            reason=f"{state.reason}; config.yaml was restored, because no step was completed with the changed {keys}",
        )
    return state


def adopt(run: RunDir) -> None:
    """Replace the config of a run by its pending one."""
    retry.rename(run.next_config, run.config)
    retry.retry(lambda: fsync_folder(run.path), run.path)


def _changed(run: RunDir) -> str:
    try:
        keys = _differing(flat(plain_tree(run.config)), flat(plain_tree(run.next_config)))
    except HpcdistError:
        keys = []
    return ", ".join(keys[:_SHOWN_KEYS]) + (" …" if len(keys) > _SHOWN_KEYS else "") or "config"


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
