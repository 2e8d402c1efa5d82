"""A new config for the next attempt of a run.

A resume with changed keys replaces `config.yaml`. The old config is kept in the folder of the last attempt, which ran
with it.
"""

from hpcdist.config.schema import Config
from hpcdist.config.written import flat_values, read_stored, run_yaml, secrets_of
from hpcdist.errors import ConfigError
from hpcdist.host import retry
from hpcdist.host.files import write_atomic
from hpcdist.run.checkpoint_files import newest_step
from hpcdist.run.folder import RunDir
from hpcdist.run.kept_secrets import keep, kept


def check(run: RunDir, config: Config) -> None:
    """Raise ConfigError if a config changes keys that determine the content of the run's checkpoint."""
    step = newest_step(run)
    stored = read_stored(run.config)
    if step is None or config.trainer.script or stored.trainer is None or not stored.trainer.fixed_keys:
        return
    fixed_keys = ["trainer.target"]
    if stored.config.trainer.target == config.trainer.target:
        fixed_keys += stored.trainer.fixed_keys
    before = stored.values
    after = flat_values(config)
    problems = []
    for key in sorted({*before, *after}):
        is_fixed = any(key == fixed or key.startswith(f"{fixed}.") for fixed in fixed_keys)
        if is_fixed and before.get(key) != after.get(key):
            problems.append(
                f"{key} was {before.get(key)!r} when the checkpoint of step {step} was written and cannot be"
                f" {after.get(key)!r} now: leave it out, or start a new run"
            )
    if problems:
        raise ConfigError(*problems, source=f"resume {run.name}")


def change_config(run: RunDir, config: Config) -> None:
    """Make `config` the config of the next attempt. The caller holds the run's lease."""
    # The old secrets stay, because a crash before the last line leaves the old config in place.
    keep(run, {**kept(run), **secrets_of(config)})
    if read_stored(run.config).values == flat_values(config):
        return
    attempts = run.attempts()
    if attempts and not retry.exists(attempts[-1].config):
        write_atomic(attempts[-1].config, run.config.read_bytes(), durable=True)
    write_atomic(run.config, run_yaml(config), durable=True)
