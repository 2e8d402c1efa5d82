"""Helpers of tests that load config files."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcdist.config.loading import load_config
from hpcdist.errors import ConfigError

#: Writes `run.yaml` and returns its path.
Write = Callable[[str], Path]


def problems(path: Path, *overrides: str) -> tuple[str, ...]:
    """Load an invalid config and return the problems of its ConfigError, which names the file or the command line."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith((f"{path}: ", "command line: ") if overrides else f"{path}: ")
    return caught.value.problems
