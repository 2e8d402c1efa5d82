"""From YAML and `key=value` to a frozen `Config`, and back to YAML without secrets.

This is the only module that knows OmegaConf. All mistakes of a file are collected and told at once. A run folder's
config is resolved already and read without OmegaConf, whose import costs each rank more than all else that is ours.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import yaml

import hpcdist
from hpcdist.config.document import (
    MAX_DEPTH,
    as_literal,
    check_bounds,
    first_line,
    parse,
    protected,
    read_document,
    read_text,
    unfit_values,
)
from hpcdist.config.redaction import (
    REDACTED,
    REDACTED_NUMBER,
    hide_values,
    is_redacted,
    is_secret_name,
    redact_text,
    redact_tree,
)
from hpcdist.config.schema import Config, cross_check, describe, exact, to_tree
from hpcdist.config.schema.declaration import trainer_sections
from hpcdist.config.schema.paths import map_paths
from hpcdist.errors import ConfigError, shortened, shown
from hpcdist.files import formats

if TYPE_CHECKING:
    from omegaconf import DictConfig

_ROLE_REQUESTS = "cluster.roles."
#: Sections that may stand as one value, and which of their keys it then is.
_SHORT_FOR = {"trainer": "target", "preflight": "mode"}


def load_config(source: str | Path, overrides: Sequence[str] = (), *, cluster: str | Path | None = None) -> Config:
    """Read a config and apply `key=value` overrides.

    Args:
        source: path of a YAML file, or the name of a shipped config (`ddp_digits`).
        cluster: path or name of a site's profile, which stands under the config's own `cluster` section.
        overrides: `section.key=value`; the value is read as YAML.

    Returns the frozen config with interpolations resolved and paths absolute.
    Raises ConfigError with one line for every mistake found.
    """
    path = find_config(source)
    tree = _read_yaml(path)
    if cluster is not None:
        profile = _read_yaml(find_config(cluster, "cluster"))
        # A site knows which runtime it has, and perhaps where its images lie.
        if site := profile.pop("container", None):
            tree["container"] = {**site, **(tree.get("container") or {})}
        own = tree.get("cluster") or {}
        tree["cluster"] = {**profile, **own} if isinstance(own, dict) else own
    with _without_values(tree):
        return _build(tree, overrides, str(path))


def load_run_config(
    path: Path, overrides: Sequence[str], env: Mapping[str, str], *, require_secrets: bool = True
) -> Config:
    """Read a run folder's config again; its redacted values come from `env`.

    Interpolations were resolved when the config was written. Whatever looks like one now is text, also in a file that
    somebody has edited; only those of `overrides` are resolved.

    Without `require_secrets`, what `env` does not hold stays `***`.
    Raises ConfigError when a secret that the run was started with is not there any more.
    """
    # As it was written; what somebody has changed since is read as any other config.
    tree = _read_written(path) or _read_yaml(path, literal=True)
    given = {text.partition("=")[0] for text in overrides}
    problems = []
    for path_of_key, value in list(leaves(tree)):
        key, name = ".".join(path_of_key), _variable(path_of_key, tree)
        if not is_redacted(value) or key in given:
            continue
        if name in env:
            _insert(tree, path_of_key, _given_back(value, env[name], name))
        elif require_secrets:
            problems.append(f"{key} was redacted when the run was written: set {name} in the environment")
    if problems:
        raise ConfigError(problems, str(path))
    with _without_values(tree):
        if not overrides and (config := exact(tree)) is not None:
            return _checked(config, str(path))
        return as_literal(_build(protected(tree), overrides, str(path)))


@contextmanager
def _without_values(tree: Mapping[str, Any]) -> Iterator[None]:
    """Take secrets, and values that come from the environment, out of the errors that the block raises.

    Args:
        tree: the config before its interpolations are resolved; overrides may be added to it in the block.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(hide_values(error.problems, tree, os.environ), error.source) from None


def find_config(source: str | Path, folder: str = "") -> Path:
    """The file that `source` means: a path, or the name of a shipped config in `folder` of them."""
    try:
        path = Path(source).expanduser()
        if path.is_file():
            return path
    except (OSError, RuntimeError, ValueError) as error:
        # A name that is too long, a user who does not exist, a NUL character.
        raise ConfigError([f"cannot be a config file: {error}"], str(source)) from error
    shipped = shipped_configs(folder)
    if str(source) in shipped:
        return shipped[str(source)]
    near = difflib.get_close_matches(str(source), shipped, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"shipped configs are {', '.join(shipped)}"
    raise ConfigError([f"no such config file: {hint}"], str(source))


def shipped_configs(folder: str = "") -> dict[str, Path]:
    """Name and path of every config that comes with hpcdist."""
    package = Path(hpcdist.__file__).resolve().parent
    configs = package / "configs" if (package / "configs").is_dir() else package.parent / "configs"
    return {path.stem: path for path in sorted((configs / folder).glob("*.yaml"))}


def to_yaml(config: Config) -> str:
    """The whole resolved config as YAML, secrets redacted."""
    return yaml.safe_dump(redacted(config), sort_keys=False, allow_unicode=True)


def run_yaml(config: Config) -> str:
    """Return the content of a run folder's config: its format, then what `to_yaml` gives."""
    return yaml.safe_dump(formats.stamped({})) + to_yaml(config)


def plain_tree(path: Path) -> dict[str, Any]:
    """Read a run folder's config as plain containers, without its format and without checks of its keys.

    Raises ConfigError when it cannot be read or holds no keys, RunFolderError when a newer hpcdist has written it.
    """
    try:
        tree = yaml.safe_load(path.read_bytes())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError([f"cannot be read: {' '.join(str(error).split())[:200]}"], str(path)) from error
    if not isinstance(tree, dict):
        raise ConfigError([f"must hold keys and values, holds a {type(tree).__name__}"], str(path))
    return formats.unstamped({str(key): value for key, value in tree.items()}, path)


def redacted(config: Config) -> dict[str, Any]:
    """The config as plain containers, with `***` for each value whose key or form says that it is a secret."""
    return redact_tree(to_tree(config))


def redacted_argument(text: str) -> str:
    """A word of the command line, its value replaced when it is an override that sets a secret."""
    key, equals, raw = text.partition("=")
    if equals and not key.startswith("-"):
        tree: dict[str, Any] = {}
        _insert(tree, key.split("."), parse_value(raw))
        if redact_tree(tree) != tree:
            text = f"{key}={REDACTED}"
    return redact_text(text)


def _given_back(shown: Any, text: str, variable: str) -> Any:
    """The value of a variable, in the form that `secrets_of` has given it: JSON for all that is no string."""
    if isinstance(shown, str) and shown != REDACTED_NUMBER:
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError([f"{variable} in the environment must hold JSON, such as 3 or [1, 2]"]) from None


def _variable(path: Sequence[str], tree: Mapping[str, Any]) -> str:
    """The environment variable that gives a redacted key its value back.

    A variable of the ranks is its own; where both sections name it, `launch.env` wins in the ranks, too.
    """
    if path[:2] == ("launch", "env"):
        return path[-1]
    if path[:2] == ("cluster", "env") and path[-1] not in ((tree.get("launch") or {}).get("env") or {}):
        return path[-1]
    return re.sub(r"\W", "_", "_".join(("hpcdist", *path))).upper()


def secret_keys(config: Config) -> list[tuple[str, ...]]:
    """The keys whose values `to_yaml` redacts."""
    clean = dict(leaves(redacted(config)))
    return [path for path, value in leaves(to_tree(config)) if clean[path] != value]


def secrets_of(config: Config) -> dict[str, str]:
    """Environment variables that give `load_run_config` back what `to_yaml` redacted."""
    tree = to_tree(config)
    values = dict(leaves(tree))
    return {
        _variable(path, tree): value if isinstance(value := values[path], str) else json.dumps(value)
        for path in secret_keys(config)
    }


class _Written(yaml.SafeLoader):
    """Reads what `to_yaml` has written: a string that looks like a number to OmegaConf (`1e5`) is still a string."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep)
        if len(found) != len(node.value):
            raise yaml.YAMLError("a key stands there twice")
        return found


def _read_written(path: Path) -> dict[str, Any] | None:
    """The content of a run folder's config, None where it is not as `to_yaml` has written it."""
    try:
        text = read_text(path)
        check_bounds(text)
        tree = yaml.load(text, _Written)  # noqa: S506  # a SafeLoader
    except (ConfigError, ValueError, yaml.YAMLError):
        return None
    if not isinstance(tree, dict):
        return None
    tree = formats.unstamped(tree, path)
    return tree if exact(tree) is not None else None


def _read_yaml(path: Path, *, literal: bool = False) -> dict[str, Any]:
    """Read a YAML file; a `literal` one holds no interpolations."""
    return formats.unstamped(read_document(path, literal=literal), path)


def _build(tree: dict[str, Any], overrides: Sequence[str], source: str) -> Config:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    problems: list[str] = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals or not key or key.startswith("-"):
            name = re.split(r"[:\s]", text, maxsplit=1)[0]
            said = f"{name} {REDACTED}" if name != text and is_secret_name(name) else text
            problems.append(f"{shown(said)} is no override: write key=value, as in optim.lr=0.01")
        elif key.count(".") >= MAX_DEPTH:
            problems.append(f"{key}: more than {MAX_DEPTH} levels deep")
        elif not _insert(tree, key.split("."), parse_value(raw)):
            problems.append(f"{key}: a part of this path is a value already, not a section")
    for section in _SHORT_FOR:
        _unfold(tree, section)
    if unfit := [*unfit_values(tree), *_nested_too_deep(tree)]:
        raise ConfigError([*problems, *unfit], source)

    merged: Any = _defaults()
    mistakes = (OmegaConfBaseException, ValueError, TypeError)
    try:
        merged = OmegaConf.merge(merged, tree)
    except mistakes:
        # A merge stops at the first mistake: merge section by section, and the leaves of those that fail one by one.
        for name, content in tree.items():
            try:
                merged = OmegaConf.merge(merged, {name: content})
                continue
            except mistakes:
                pass
            for path, value in leaves({name: content}):
                leaf: dict[str, Any] = {}
                _insert(leaf, path, value)
                try:
                    merged = OmegaConf.merge(merged, leaf)
                except mistakes as error:
                    problems.append(_sentence(".".join(path), value, error))
    assert isinstance(merged, DictConfig)
    sections: dict[str, Any] = {}
    for name in merged:
        assert isinstance(name, str)
        try:
            sections[name] = _section(merged, name)
        except OmegaConfBaseException as error:
            problems.append(f"{error.full_key or name}: {first_line(error)}")
        except ValueError as error:
            problems += [f"{name}.{line}" for line in str(error).splitlines()]
        except (TypeError, AttributeError) as error:
            problems.append(_of_another_type(name, error))
    own = {name: sections.pop(name) for name in trainer_sections() if name in sections}
    plain = {name: value for name, value in sections.items() if not dataclasses.is_dataclass(value)}
    try:
        Config(**plain)
    except ValueError as error:
        problems += str(error).splitlines()
    except (TypeError, AttributeError) as error:
        problems.append(_of_another_type("the config", error))
    if problems:
        raise ConfigError(problems, source)
    chosen = {name: section for name, section in own.items() if name in tree or name == sections["trainer"].target}
    return _checked(Config(**sections, sections=chosen), source)


def _nested_too_deep(tree: Mapping[str, Any]) -> Iterator[str]:
    """Containers where a dict or list of the schema holds single values: OmegaConf lets them pass."""
    for key, kind in _kinds().items():
        of = kind.partition("[")[2].removeprefix("str, ").removesuffix("]")
        value: Any = tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if of not in ("int", "str", "float") or not isinstance(value, Mapping | list):
            continue
        for name, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            if isinstance(entry, Mapping | list):
                yield f"{key}.{name} must be {'a string' if of == 'str' else of}, got {shown(entry)}"


def _of_another_type(where: str, error: Exception) -> str:
    """A section or list where a value belongs, by an interpolation: what OmegaConf does not check."""
    return f"{where}: an interpolation gives a value of another type than its key has ({shortened(first_line(error))})"


def parse_value(raw: str) -> Any:
    """The value of an override, read as OmegaConf reads YAML (`3e-4` is a number); what is no YAML is text."""
    try:
        return parse(raw)
    except ValueError:
        return raw


def _section(merged: DictConfig, name: str) -> Any:
    from omegaconf import OmegaConf

    node = merged[name]
    return OmegaConf.to_object(node) if OmegaConf.is_config(node) else node


def _checked(config: Config, source: str) -> Config:
    problems: list[str] = []

    def whole(key: str, text: str) -> str:
        try:
            return str(Path(text).expanduser().absolute())
        except RuntimeError:
            problems.append(f"{key}: no home folder is known for {shown(Path(text).parts[0])}: write the whole path")
            return text

    config = map_paths(config, "", whole)
    changed: dict[str, Any] = {
        "data": map_paths(config.data, "data.", whole),
        "sections": {name: map_paths(section, f"{name}.", whole) for name, section in config.sections.items()},
    }
    trainer, tracking, container = config.trainer, config.tracking, config.container
    if trainer.script:
        # As torchrun takes it: from where the user stands. Ranks and later resumes may stand elsewhere.
        script = [whole("trainer.script", trainer.script[0]), *trainer.script[1:]]
        changed["trainer"] = dataclasses.replace(trainer, script=script)
    if (uri := tracking.uri).startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        file = whole("tracking.uri", uri.removeprefix("sqlite:///"))
        changed["tracking"] = dataclasses.replace(tracking, uri=f"sqlite:///{file}")
    image = container.image
    is_path = container.runtime in ("apptainer", "charliecloud", "enroot") or image.endswith((".sqsh", ".sif"))
    # Docker, podman and pyxis take an image from a registry or store of their own by name.
    if image and is_path and "://" not in image:
        image = whole("container.image", image)
    mounts = [whole("container.mounts", mount) if mount.startswith("~") else mount for mount in container.mounts]
    changed["container"] = dataclasses.replace(container, image=image, mounts=mounts)
    config = dataclasses.replace(config, **changed)
    if not problems:
        problems = [*unfit_values(to_tree(config)), *cross_check(config)]
    if problems:
        raise ConfigError(problems, source)
    return config


@functools.cache
def _defaults() -> DictConfig:
    """The schema with its defaults, for merging into; making it takes longer than all else of loading a config."""
    from omegaconf import OmegaConf

    kinds = get_type_hints(Config)
    keys: list[Any] = []
    for one in dataclasses.fields(Config):
        if one.name == "sections":
            keys += [(name, kind, dataclasses.field(default_factory=kind)) for name, kind in trainer_sections().items()]
        elif one.default is not dataclasses.MISSING:
            keys.append((one.name, kinds[one.name], dataclasses.field(default=one.default)))
        else:
            keys.append((one.name, kinds[one.name], dataclasses.field(default_factory=one.default_factory)))
    found: DictConfig = OmegaConf.structured(dataclasses.make_dataclass("Keys", keys))
    return found


@functools.cache
def _kinds() -> dict[str, str]:
    """Type of every key, read from the schema's source once."""
    return {path: kind for path, kind, _, _ in describe()}


def _sentence(key: str, value: object, error: Exception) -> str:
    """One line of key, value, expectation and fix, from whatever OmegaConf raised."""
    known = {_for_role(path, key): kind for path, kind in _kinds().items()}
    if key in known:
        detail = first_line(error)
        # A long one repeats the value.
        return f"{key} must be {known[key]}, got {shown(value)}" + (f" ({detail})" if len(detail) <= 120 else "")
    if any(path.startswith(f"{key}.") for path in known):
        return f"{key} is a section: give it keys, got {shown(value)}"
    holder = next((path for path in known if key.startswith(f"{path}.") and known[path].startswith("dict")), None)
    if holder and not key.startswith(_ROLE_REQUESTS):
        return f"{holder} must be {known[holder]}, got {shown(value)} for {key}"
    leaf = key.rpartition(".")[2]
    same_leaf = [path for path in known if path.rpartition(".")[2] == leaf]
    sections = {path.partition(".")[0] for path in known if "." in path}
    near = difflib.get_close_matches(key, same_leaf or {*known, *sections}, n=1, cutoff=0.0 if same_leaf else 0.6)
    hint = f"did you mean {near[0]!r}?" if near else "`hpcdist config --schema` lists all keys"
    return f"{key} is not a key: {hint}"


def _for_role(path: str, key: str) -> str:
    """A key of the schema for the role that `key` names, where both are about what a role asks of a cluster."""
    if not key.startswith(_ROLE_REQUESTS):
        return path
    return path.replace(
        f"{_ROLE_REQUESTS}ROLE.", f"{_ROLE_REQUESTS}{key.removeprefix(_ROLE_REQUESTS).partition('.')[0]}."
    )


def leaves(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value that is not a mapping (an empty one counts as a value), with the keys that lead to it.

    Keys, not a dotted path: free keys such as MLflow's tags may hold dots themselves.
    """
    for key, value in tree.items():
        path = (*above, str(key))
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def _unfold(tree: dict[str, Any], section: str) -> None:
    """Write a section out in full that stands there as one value: `trainer: ddp`, `preflight: off`."""
    value = tree.get(section)
    if value is False:
        value = "off"  # YAML's word for it
    if section in _SHORT_FOR and isinstance(value, str):
        tree[section] = {_SHORT_FOR[section]: value}


def _insert(tree: dict[str, Any], path: Sequence[str], value: Any) -> bool:
    """Set a value in nested dicts; False where another value stands in the way."""
    *parents, leaf = path
    for index, parent in enumerate(parents):
        if index == 0:
            _unfold(tree, parent)
        child = tree.setdefault(parent, {})
        if child is None:
            child = tree[parent] = {}
        if not isinstance(child, dict):
            return False
        tree = child
    tree[leaf] = value
    return True
