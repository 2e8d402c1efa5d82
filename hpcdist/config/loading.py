"""From YAML and `key=value` overrides to a frozen `Config`, with absolute paths and the checks that involve several
sections.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcdist.config.conversion import as_written, exact
from hpcdist.config.document import escaped, read_document, unfit_values
from hpcdist.config.launch_schema import map_paths
from hpcdist.config.merging import COMMAND_LINE, merge
from hpcdist.config.redaction import hide_values
from hpcdist.config.schema import Config, cross_check, to_tree
from hpcdist.config.shipped import find_config
from hpcdist.config.tree import expand_short_forms, flat
from hpcdist.config.written import restore_secrets, stored_tree, with_params
from hpcdist.errors import ConfigError, shown
from hpcdist.host import files


def load_config(source: str | Path, overrides: Sequence[str] = (), *, cluster: str | Path | None = None) -> Config:
    """Read a config and apply `key=value` overrides.

    Args:
        source: path of a YAML file, or the name of a shipped config (`ddp_digits`).
        cluster: path or name of a site's profile; the config's own `cluster` section overrides it.
        overrides: `section.key=value`; the value is read as YAML.

    Returns the frozen config with interpolations resolved and paths absolute.
    Raises ConfigError with one line for every mistake found; for those of `overrides` it names the command line, for
    those of `cluster` the profile's path.
    """
    path = find_config(source)
    tree = _read_yaml(path)
    if cluster is None:
        return _with_overrides(tree, overrides, str(path), Path.cwd())
    site = find_config(cluster, "cluster")
    alone = copy.deepcopy(tree)
    keys = _add_profile(tree, _read_profile(site))
    try:
        return _with_overrides(tree, overrides, str(path), Path.cwd())
    except ConfigError as error:
        raise _located(error, str(site), keys, _problems(alone, str(path), Path.cwd())) from None


def written_keys(source: str | Path, overrides: Sequence[str] = (), *, cluster: str | Path | None = None) -> list[str]:
    """Return the dotted keys that `load_config` does not take from the defaults."""
    tree = _read_yaml(find_config(source))
    if cluster is not None:
        _add_profile(tree, _read_profile(find_config(cluster, "cluster")))
    expand_short_forms(tree)
    return list(dict.fromkeys([*flat(tree), *(text.partition("=")[0] for text in overrides)]))


def _add_profile(tree: dict[str, Any], profile: dict[str, Any]) -> list[str]:
    """Add the values of a site's profile that a config does not set itself. Returns the dotted keys of the profile."""
    keys = [f"cluster.{key}" for key in profile if key != "container"]
    # A site's profile may contain the container runtime and the location of images.
    if container := profile.pop("container", None):
        mine = tree.get("container") or {}
        if isinstance(container, dict) and isinstance(mine, dict):
            keys += [f"container.{key}" for key in container]
            tree["container"] = {**container, **mine}
        elif not mine:  # a mistake, which the checks of all sections find
            keys.append("container")
            tree["container"] = container
    own = tree.get("cluster") or {}
    if isinstance(own, dict):
        theirs, mine = profile.get("environment"), own.get("environment")
        if isinstance(theirs, dict) and isinstance(mine, dict):  # a section of its own, merged by key as well
            own = {**own, "environment": {**theirs, **mine}}
        own = {**profile, **own}
    tree["cluster"] = own
    return keys


def load_run_config(
    path: Path, overrides: Sequence[str], env: Mapping[str, str], *, require_secrets: bool = True
) -> Config:
    """Read a run folder's config and restore its redacted values from `env`.

    Interpolations were resolved when the config was written. `${` in the file is text, also if the file was edited
    since; only interpolations of `overrides` are resolved.

    Without `require_secrets`, values that `env` does not contain stay `***`.
    Raises ConfigError if a secret of the run is missing.
    """
    source = str(path)
    given = {text.partition("=")[0] for text in overrides}
    tree = stored_tree(path)
    secrets = restore_secrets(tree, env, without=given, require=require_secrets, source=source)
    if (config := exact(tree)) is None:  # edited: read like any other config
        tree = _read_yaml(path)
        secrets = restore_secrets(tree, env, without=given, require=require_secrets, source=source)
    with _hidden_values(tree):
        if config is not None and not overrides:
            return resolve(replace(config, secret_texts=secrets), source)
        config = _with_overrides(escaped(tree), overrides, source)
    return replace(config, secret_texts={**secrets, **config.secret_texts})


def _with_overrides(tree: dict[str, Any], overrides: Sequence[str], source: str, code: Path | None = None) -> Config:
    """Return the config of plain containers and overrides. Raises ConfigError without secrets.

    Args:
        code: folder of the trainer that declares `params`; None if the config of a run folder has been checked.
    """
    alone = copy.deepcopy(tree) if overrides else tree
    try:
        return _resolved_config(tree, overrides, source, code)
    except ConfigError as error:
        if not overrides:
            raise
        keys = [text.partition("=")[0] for text in overrides]
        raise _located(error, COMMAND_LINE.removesuffix(": "), keys, _problems(alone, source, code)) from None


def _resolved_config(tree: dict[str, Any], overrides: Sequence[str], source: str, code: Path | None) -> Config:
    with _hidden_values(tree):
        config = resolve(merge(tree, overrides, source), source)
        return config if code is None else with_params(config, code, source)


def _problems(tree: dict[str, Any], source: str, code: Path | None) -> Sequence[str]:
    """Return the problems of plain containers, without secrets."""
    try:
        _resolved_config(tree, (), source, code)
    except ConfigError as error:
        return error.problems
    return ()


def _located(error: ConfigError, origin: str, keys: Sequence[str], file_problems: Sequence[str]) -> ConfigError:
    """Return the error with `origin` (command line, site's profile) named as the source of the problems of its keys.

    A problem is one of `origin` if it mentions one of its keys and the file alone does not have it. The second
    condition is not sufficient: other mistakes of the file may prevent a check that finds this one.
    """
    if f"{error.source}: " == COMMAND_LINE:
        return error  # all problems are located
    prefix = f"{origin}: "

    def marked(line: str) -> str:
        is_marked = line.startswith((COMMAND_LINE, prefix))
        return line if is_marked or line in file_problems or not _mentions(line, keys) else f"{prefix}{line}"

    problems = [marked(line) for line in error.problems]
    if all(line.startswith(prefix) for line in problems):
        return ConfigError([line.removeprefix(prefix) for line in problems], origin)
    return ConfigError(problems, error.source)


def _mentions(line: str, keys: Sequence[str]) -> bool:
    """Return whether a line contains one of the keys, a key below one, or a section that contains one."""
    words = re.findall(r"[\w-]+(?:\.[\w-]+)*", line)
    return any(f"{key}.".startswith(f"{word}.") or word.startswith(f"{key}.") for key in keys for word in words)


@contextmanager
def _hidden_values(tree: Mapping[str, Any]) -> Iterator[None]:
    """Remove secrets, and values from the environment, from the errors that the block raises.

    Args:
        tree: the config before its interpolations are resolved; overrides may be added to it in the block.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(hide_values(error.problems, tree, os.environ), error.source) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    return files.unstamped(as_written(*read_document(path)), path)


def _read_profile(path: Path) -> dict[str, Any]:
    tree, texts = read_document(path)
    tree = as_written({"cluster": tree}, {"cluster": texts})["cluster"]
    return files.unstamped(as_written(tree, texts), path)  # for its section `container`


# The last step of loading: absolute paths, and the checks that involve several sections.


def resolve(config: Config, source: str) -> Config:
    """Return the config with absolute paths. Raises ConfigError if its sections contradict each other."""
    problems: list[str] = []

    def absolute(key: str, text: str) -> str:
        try:
            return str(Path(text).expanduser().absolute())
        except RuntimeError:
            problems.append(f"{key}: the home folder of {shown(Path(text).parts[0])} is unknown: use an absolute path")
            return text

    config = map_paths(config, "", absolute)
    environment = map_paths(config.cluster.environment, "cluster.environment.", absolute)
    changes: dict[str, Any] = {
        "cluster": replace(config.cluster, environment=environment),
        "data": map_paths(config.data, "data.", absolute),
        "sections": {name: map_paths(section, f"{name}.", absolute) for name, section in config.sections.items()},
    }
    if path := config.trainer.script_file:
        # torchrun resolves the script in the current folder, which differs from that of ranks and of later resumes.
        script = [absolute("trainer.script", str(path)), *config.trainer.script[1:]]
        changes["trainer"] = replace(config.trainer, script=script)
    if (uri := config.tracking.uri).startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        file = absolute("tracking.uri", uri.removeprefix("sqlite:///"))
        changes["tracking"] = replace(config.tracking, uri=f"sqlite:///{file}")
    container, image = config.container, config.container.image
    is_path = container.runtime in ("apptainer", "charliecloud", "enroot") or image.endswith((".sqsh", ".sif"))
    # docker, podman and pyxis find other images by name in a registry or in their own storage.
    if image and is_path and "://" not in image:
        image = absolute("container.image", image)
    mounts = [absolute("container.mounts", mount) if mount.startswith("~") else mount for mount in container.mounts]
    changes["container"] = replace(container, image=image, mounts=mounts)
    config = replace(config, **changes)
    if not problems:
        problems = [*unfit_values(to_tree(config)), *cross_check(config)]
    if problems:
        raise ConfigError(problems, source)
    return config
