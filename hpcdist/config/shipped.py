"""Config files by path, or by name for those that are shipped with hpcdist."""

from __future__ import annotations

from pathlib import Path

import hpcdist
from hpcdist.errors import ConfigError, suggestion


def find_config(source: str | Path, folder: str = "") -> Path:
    try:
        path = Path(source).expanduser()
        if path.is_file():
            return path
    except (OSError, RuntimeError, ValueError) as error:
        # A name that is too long, an unknown user, or a NUL character.
        raise ConfigError([f"cannot be a config file: {error}"], str(source)) from error
    shipped = shipped_configs(folder)
    if str(source) in shipped:
        return shipped[str(source)]
    hint = suggestion(str(source), shipped, f"shipped configs are {', '.join(shipped)}")
    raise ConfigError([f"no such config file: {hint}"], str(source))


def shipped_configs(folder: str = "") -> dict[str, Path]:
    package = Path(hpcdist.__file__).resolve().parent
    configs = package / "configs" if (package / "configs").is_dir() else package.parent / "configs"
    return {path.stem: path for path in sorted((configs / folder).glob("*.yaml"))}
