"""From YAML and `key=value` overrides to a frozen `Config`, with absolute paths and the checks that involve several
sections.
"""

from __future__ import annotations

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
from hpcdist.config.merging import Origins, add_overrides, merge
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
    tree, origins = _read_yaml(path), Origins()
    if cluster is not None:
        site = find_config(cluster, "cluster")
        origins = dict.fromkeys(_add_profile(tree, _read_profile(site)), str(site))
    return _with_overrides(tree, overrides, str(path), origins, Path.cwd())


def written_keys(source: str | Path, overrides: Sequence[str] = (), *, cluster: str | Path | None = None) -> list[str]:
    """Return the dotted keys that `load_config` does not take from the defaults."""
    tree = _read_yaml(find_config(source))
    if cluster is not None:
        _add_profile(tree, _read_profile(find_config(cluster, "cluster")))
    expand_short_forms(tree)
    return list(dict.fromkeys([*flat(tree), *(text.partition("=")[0] for text in overrides)]))


def _add_profile(tree: dict[str, Any], profile: dict[str, Any]) -> list[str]:
    """Add the values of a site's profile that a config does not set itself. Returns their dotted keys."""
    added: list[str] = []

    def with_theirs(section: str, mine: Any, theirs: Any) -> Any:
        if isinstance(mine, dict) and isinstance(theirs, dict):
            added.extend(f"{section}.{key}" for key in theirs if key not in mine)
            return {**theirs, **mine}
        if not mine:  # theirs is a mistake, which the checks of all sections find
            added.append(section)
        return mine or theirs

    # A site's profile may contain the container runtime and the location of images.
    if container := profile.pop("container", None):
        tree["container"] = with_theirs("container", tree.get("container") or {}, container)
    cluster = tree["cluster"] = with_theirs("cluster", own := tree.get("cluster") or {}, profile)
    if isinstance(own, dict) and isinstance(own.get("environment"), dict) and "environment" in profile:
        # A section of its own, merged by key as well.
        cluster["environment"] = with_theirs("cluster.environment", own["environment"], profile["environment"])
    return added


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
    for read in (stored_tree, _read_yaml):  # the second for a file that was edited
        tree = read(path)
        secrets = restore_secrets(tree, env, without=given, require=require_secrets, source=source)
        if (config := exact(tree)) is not None:
            break
    with _hidden_values(tree):
        if config is not None and not overrides:
            return resolve(replace(config, secret_texts=secrets), source)
        config = _with_overrides(escaped(tree), overrides, source, Origins())
    return replace(config, secret_texts={**secrets, **config.secret_texts})


def _with_overrides(
    tree: dict[str, Any], overrides: Sequence[str], source: str, origins: Origins, code: Path | None = None
) -> Config:
    """Return the config of plain containers and overrides. Raises ConfigError without secrets.

    Args:
        origins: where the values come from that are not from `source`.
        code: folder of the trainer that declares `params`; None if the config of a run folder has been checked.
    """
    with _hidden_values(tree):
        malformed = add_overrides(overrides, tree, origins)
        try:
            config = resolve(merge(tree, malformed, source), source)
            return config if code is None else with_params(config, code, source)
        except ConfigError as error:
            raise _located(error, origins) from None


def _located(error: ConfigError, origins: Origins) -> ConfigError:
    """Return the error with the command line or the site's profile before the mistakes in their values.

    A line begins with its key, may name another one that conflicts with it, and ends with `: ` and the fix.
    """

    def origin(line: str) -> str:
        found = [key for key in origins if re.match(rf"{re.escape(key)}(?![\w-])", line)]
        if not found:
            problem = line.rpartition(": ")[0] or line
            dotted = (key for key in origins if "." in key)  # others, such as `name`, are words of sentences, too
            found = [key for key in dotted if re.search(rf"(?<![\w.-]){re.escape(key)}(?![\w.-])", problem)]
        return origins[max(found, key=len)] if found else error.source

    located = [(origin(line), line) for line in error.problems]
    if len({place for place, _ in located}) == 1:
        return ConfigError(error.problems, located[0][0])
    lines = [line if place == error.source else f"{place}: {line}" for place, line in located]
    return ConfigError(lines, error.source)


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
