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
    step, stored = newest_step(run), read_stored(run.config)
    if step is None or config.trainer.script or stored.trainer is None or not stored.trainer.fixed_keys:
        return
    before, after = stored.values, flat_values(config)
    is_same = stored.config.trainer.target == config.trainer.target
    fixed = ("trainer.target", *stored.trainer.fixed_keys) if is_same else ("trainer.target",)
    problems = [
        f"{key} was {before.get(key)!r} when the checkpoint of step {step} was written and cannot be {after.get(key)!r}"
        " now: leave it out, or start a new run"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and any(key == one or key.startswith(f"{one}.") for one in fixed)
    ]
    if problems:
        raise ConfigError(*problems, source=f"resume {run.name}")


def change_config(run: RunDir, config: Config) -> None:
    """Make `config` the config of the next attempt. The caller holds the run's lease."""
    keep(run, {**kept(run), **secrets_of(config)})  # a crash may keep the old config
    if read_stored(run.config).values == flat_values(config):
        return
    if (attempts := run.attempts()) and not retry.exists(attempts[-1].config):
        write_atomic(attempts[-1].config, run.config.read_bytes(), durable=True)
    write_atomic(run.config, run_yaml(config), durable=True)
