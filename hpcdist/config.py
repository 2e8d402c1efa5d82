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
from typing import TYPE_CHECKING, Any, TypeVar, cast

import yaml

from hpcdist import formats
from hpcdist.errors import ConfigError
from hpcdist.models import check_model_name
from hpcdist.redaction import (
    REDACTED,
    REDACTED_NUMBER,
    hide_values,
    is_redacted,
    is_secret_name,
    redact_text,
    redact_tree,
)
from hpcdist.schema import Config, ContainerConfig, cross_check, describe, exact

if TYPE_CHECKING:
    from omegaconf import DictConfig

T = TypeVar("T")
#: Stands for `${` where OmegaConf shall not see it: a character of private use makes it unlike any text.
_NO_INTERPOLATION = "$\ue0f7{"
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
            sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
            return _checked(sections, str(path))
        return _literal(_build(_protected(tree), overrides, str(path)))


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
    path = Path(source).expanduser()
    if path.is_file():
        return path
    shipped = shipped_configs(folder)
    if str(source) in shipped:
        return shipped[str(source)]
    near = difflib.get_close_matches(str(source), shipped, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"shipped configs are {', '.join(shipped)}"
    raise ConfigError([f"no such config file: {hint}"], str(source))


def shipped_configs(folder: str = "") -> dict[str, Path]:
    """Name and path of every config that comes with hpcdist."""
    package = Path(__file__).resolve().parent
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
    return redact_tree(dataclasses.asdict(config))


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
    return [path for path, value in leaves(dataclasses.asdict(config)) if clean[path] != value]


def secrets_of(config: Config) -> dict[str, str]:
    """Environment variables that give `load_run_config` back what `to_yaml` redacted."""
    tree = dataclasses.asdict(config)
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
        tree = yaml.load(path.read_bytes(), _Written)  # noqa: S506  # a SafeLoader
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    if not isinstance(tree, dict):
        return None
    tree = formats.unstamped(tree, path)
    return tree if exact(tree) is not None else None


def _protected(value: Any) -> Any:
    """Return a tree in whose strings OmegaConf finds no interpolation; `_literal` gives the strings back."""
    if isinstance(value, dict):
        return {key: _protected(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_protected(item) for item in value]
    return value.replace("${", _NO_INTERPOLATION) if isinstance(value, str) else value


def _literal(value: T) -> T:
    """Return a config, or a value of one, with the strings that `_protected` has changed as they were."""
    found: Any = value
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        fields = {field.name: _literal(getattr(found, field.name)) for field in dataclasses.fields(found)}
        found = dataclasses.replace(found, **fields)
    elif isinstance(found, dict):
        found = {_literal(key): _literal(item) for key, item in found.items()}
    elif isinstance(found, list):
        found = [_literal(item) for item in found]
    elif isinstance(found, str):
        found = found.replace(_NO_INTERPOLATION, "${")
    return cast(T, found)


def _read_yaml(path: Path, *, literal: bool = False) -> dict[str, Any]:
    """Read a YAML file; a `literal` one holds no interpolations."""
    from omegaconf import OmegaConf

    try:
        if literal:
            # In the text, since OmegaConf parses interpolations when it reads them.
            text = path.read_text("utf-8").replace("${", _NO_INTERPOLATION)
            tree = _literal(OmegaConf.to_container(OmegaConf.create(text), resolve=False))
        else:
            tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError:
        raise ConfigError(["no such file"], str(path)) from None
    except OSError as error:
        raise ConfigError([f"cannot be read: {error.strerror or error}"], str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(["is not UTF-8 text"], str(path)) from error
    except yaml.YAMLError as error:
        raise ConfigError([_yaml_problem(error)], str(path)) from None
    if not isinstance(tree, dict):
        raise ConfigError([f"must hold keys and values, holds a {type(tree).__name__}"], str(path))
    return formats.unstamped({str(key): value for key, value in tree.items()}, path)


def _yaml_problem(error: yaml.YAMLError) -> str:
    """What YAML does not take, and where. An alias or a tag by mistake may be the beginning of a password: `*p4ss`."""
    text = " ".join(str(error).split())
    return re.sub(r"(alias|anchor|tag) '[^']*'", r"\1", text)


def _build(tree: dict[str, Any], overrides: Sequence[str], source: str) -> Config:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    problems: list[str] = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals or not key or key.startswith("-"):
            name = re.split(r"[:\s]", text, maxsplit=1)[0]
            shown = f"{name} {REDACTED}" if name != text and is_secret_name(name) else text
            problems.append(f"{shown!r} is no override: write key=value, as in optim.lr=0.01")
        elif not _insert(tree, key.split("."), parse_value(raw)):
            problems.append(f"{key}: a part of this path is a value already, not a section")
    for section in _SHORT_FOR:
        _unfold(tree, section)

    merged = OmegaConf.structured(Config)
    try:
        merged = OmegaConf.merge(merged, tree)
    except (OmegaConfBaseException, ValueError, TypeError):
        # A merge stops at the first mistake, so look again leaf by leaf for all of them.
        for path, value in leaves(tree):
            leaf: dict[str, Any] = {}
            _insert(leaf, path, value)
            try:
                merged = OmegaConf.merge(merged, leaf)
            except (OmegaConfBaseException, ValueError, TypeError) as error:
                problems.append(_sentence(".".join(path), value, error))
    assert isinstance(merged, DictConfig)
    sections: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        try:
            sections[field.name] = _section(merged, field.name)
        except OmegaConfBaseException as error:
            # Its further lines are detail of no use here.
            problems.append(f"{error.full_key or field.name}: {str(error).splitlines()[0]}")
        except ValueError as error:
            problems += [f"{field.name}.{line}" for line in str(error).splitlines()]
    plain = {name: value for name, value in sections.items() if not dataclasses.is_dataclass(value)}
    try:
        Config(**plain)
    except ValueError as error:
        problems += str(error).splitlines()
    if problems:
        raise ConfigError(problems, source)
    return _checked(sections, source)


def parse_value(raw: str) -> Any:
    """The value of an override, read as OmegaConf reads YAML (`3e-4` is a number)."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={raw}"]), resolve=False)["value"]  # type: ignore[index,call-overload]
    except (OmegaConfBaseException, yaml.YAMLError):
        return raw


def _section(merged: DictConfig, name: str) -> Any:
    from omegaconf import OmegaConf

    node = merged[name]
    return OmegaConf.to_object(node) if OmegaConf.is_config(node) else node


def _checked(sections: dict[str, Any], source: str) -> Config:
    data, tracking, trainer = sections["data"], sections["tracking"], sections["trainer"]
    if trainer.script:
        # As torchrun takes it: from where the user stands. Ranks and later resumes may stand elsewhere.
        script = [str(Path(trainer.script[0]).expanduser().absolute()), *trainer.script[1:]]
        sections["trainer"] = dataclasses.replace(trainer, script=script)
    sections["runs_dir"] = str(Path(sections["runs_dir"]).expanduser().absolute())
    sections["data"] = dataclasses.replace(data, root=str(Path(data.root).expanduser().absolute()))
    files = [str(Path(file).expanduser().absolute()) for file in sections["rnn"].files]
    sections["rnn"] = dataclasses.replace(sections["rnn"], files=files)
    if (hybrid := sections["hybrid"]).data:
        sections["hybrid"] = dataclasses.replace(hybrid, data=str(Path(hybrid.data).expanduser().absolute()))
    if (uri := tracking.uri).startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        file = Path(uri.removeprefix("sqlite:///")).expanduser().absolute()
        sections["tracking"] = dataclasses.replace(tracking, uri=f"sqlite:///{file}")
    sections["container"] = _absolute_image(sections["container"])
    config = Config(**sections)
    problems = cross_check(config)
    if config.trainer.target == "ddp" and not config.trainer.script:
        try:
            check_model_name(config.model.name)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems, source)
    return config


def _absolute_image(container: ContainerConfig) -> ContainerConfig:
    """With whole paths, also where the runtime takes its image from a registry or store of its own by name."""
    image = container.image
    is_path = container.runtime in ("apptainer", "charliecloud", "enroot") or image.endswith((".sqsh", ".sif"))
    if image and is_path and "://" not in image:
        image = str(Path(image).expanduser().absolute())
    mounts = [str(Path(mount).expanduser()) for mount in container.mounts]
    return dataclasses.replace(container, image=image, mounts=mounts)


@functools.cache
def _kinds() -> dict[str, str]:
    """Type of every key, read from the schema's source once."""
    return {path: kind for path, kind, _, _ in describe()}


def _sentence(key: str, value: object, error: Exception) -> str:
    """One line of key, value, expectation and fix, from whatever OmegaConf raised."""
    known = {_for_role(path, key): kind for path, kind in _kinds().items()}
    if key in known:
        first = str(error).splitlines()[0]
        return f"{key} must be {known[key]}, got {value!r} ({first})"
    if any(path.startswith(f"{key}.") for path in known):
        return f"{key} is a section: give it keys, got {value!r}"
    holder = next((path for path in known if key.startswith(f"{path}.") and known[path].startswith("dict")), None)
    if holder and not key.startswith(_ROLE_REQUESTS):
        return f"{holder} must be {known[holder]}, got {value!r} for {key}"
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
