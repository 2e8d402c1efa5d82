"""Start a run with the config and the code of another one: `--like RUN`, and the parts that `resume` shares with it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcdist.cli import options
from hpcdist.errors import UserMistake
from hpcdist.host.ownership import require_trusted

if TYPE_CHECKING:
    from hpcdist.config.schema import Config
    from hpcdist.run.config_origin import Origin
    from hpcdist.run.folder import RunDir


@dataclass(frozen=True, kw_only=True)
class Like:
    """The parts of another run that a new run starts with."""

    run: RunDir  #: the other run; its code is copied
    config: Config  #: its config with overrides, and with a name for the new run
    origin: Origin | None  #: the config that the other run was started with; None if it is not recorded


def load_like(name: str, words: Sequence[str], action: str) -> Like:
    """Return the parts of the run `name` that a new run starts with.

    Args:
        words: overrides of its config.
        action: the command that starts the new run, for messages.
    """
    from hpcdist.run import create
    from hpcdist.run.config_origin import read_origin
    from hpcdist.run.lookup import resolve_run

    run = resolve_run(name, options.runs_dir())
    require_trusted(run.path, action)
    config = create.with_name(load_copied(run, ["name=''", *words], action))
    origin = read_origin(run)
    if origin is not None:
        changed_keys = [word.partition("=")[0] for word in words]
        origin = replace(origin, written=[*origin.written, *changed_keys])
    return Like(run=run, config=config, origin=origin)


def load_copied(run: RunDir, words: Sequence[str], action: str, code: Path | None = None) -> Config:
    """Return the config of a run with overrides.

    Secrets come from the run folder and from the environment.

    Args:
        words: the overrides.
        action: the command that starts the run, for messages.
        code: folder of the code that runs; by default the copy in the run folder.
    """
    from hpcdist.config.loading import load_run_config
    from hpcdist.config.written import with_params
    from hpcdist.run import snapshot
    from hpcdist.run.config_origin import referring_overrides
    from hpcdist.run.kept_secrets import kept

    env = {**kept(run), **os.environ}
    config = load_run_config(run.config, [*referring_overrides(run, env), *words], env)
    if code is None:
        folders = snapshot.import_path(snapshot.code_state(run), run)
        if not folders:
            return config
        code = Path(folders[0])
    return with_params(config, code, f"{action} {run.name}")


def words_like(config: str | None, overrides: Sequence[str] | None, exclusive: Mapping[str, object]) -> list[str]:
    """Return the words of a command line with `--like`, all of which are overrides.

    Args:
        exclusive: options that cannot be combined with `--like`, with their values.
    """
    given = [name for name, value in exclusive.items() if value]
    if given:
        raise UserMistake(f"--like and {given[0]} exclude each other: --like takes config and code from the run")
    words = [] if config is None else [config]
    return [*words, *(overrides or [])]
