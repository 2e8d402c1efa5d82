"""Load a frozen `Config` from YAML and `key=value` overrides, and report all mistakes at once."""

import ast
import difflib
import functools
import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hpcdist.config import document
from hpcdist.config.conversion import as_written, convert, exact, texts_of
from hpcdist.config.describe import all_keys, declared_type
from hpcdist.config.redaction import REDACTED, hide_values, is_secret_name, named_secrets, redact_text
from hpcdist.config.removed import removal, without_removed_defaults
from hpcdist.config.schema import Config, ParamTexts, SecretTexts, cross_check, to_tree
from hpcdist.config.section import map_paths
from hpcdist.config.slurm_notation import minutes_of
from hpcdist.config.trainer_declaration import find_trainer, trainer_sections
from hpcdist.config.training_schema import HUGGING_FACE_CONFIG, WEIGHT_SUFFIXES
from hpcdist.config.written import restore_secrets, stored_document, with_params
from hpcdist.errors import ConfigError, shown
from hpcdist.host.files import read_regular
from hpcdist.host.json_files import unstamped

#: The origin of values that are not from the config file: the command line or the path of a profile. Keys are dotted
#: keys of the config, and the messages about malformed overrides.
Origins = dict[str, str]
_COMMAND_LINE = "command line"
_ROLE_REQUESTS = "cluster.roles."
_CONTAINERS = ("dict[", "list[")
#: A reference to another key, such as `${params.lr}`.
_REFERENCE = r"(?<!\\)\$\{([\w-]+(?:\.[\w-]+)*)\}"


def load_config(source: str | Path, overrides: Sequence[str] = (), *, cluster: str | Path | None = None) -> Config:
    """Return a config with overrides applied, interpolations resolved and paths absolute.

    Args:
        source: path of a YAML file, or the name of a shipped config (`ddp_digits`).
        cluster: path or name of a site's profile; the config's own `cluster` section overrides it.
        overrides: `section.key=value`; the value is read as YAML.

    Raises ConfigError with one line for every mistake found. Mistakes in `overrides` are reported with `command line`,
    mistakes in the site's profile with its path.
    """
    path, tree, texts, origins = _sources(source, cluster)
    return _with_overrides(tree, texts, overrides, str(path), origins, Path.cwd())


def written_keys(source: str | Path, overrides: Sequence[str], *, cluster: str | Path | None) -> list[str]:
    """Return the dotted keys that `load_config` does not take from the defaults."""
    _, tree, _, _ = _sources(source, cluster)
    document.expand_short_forms(tree)
    return list(dict.fromkeys([*document.flat(tree), *(text.partition("=")[0] for text in overrides)]))


def written_references(
    source: str | Path, overrides: Sequence[str], *, cluster: str | Path | None
) -> dict[str, str | list[str]]:
    """Return the values of `load_config` that refer to other keys, as they are written, by dotted key.

    In a list such as `[--lr, "${params.lr}"]`, entries that refer to no key are empty.
    """
    _, tree, _, _ = _sources(source, cluster)
    document.expand_short_forms(tree)
    _add_overrides(overrides, tree, Origins())
    references: dict[str, str | list[str]] = {}
    for path, value in document.leaves(tree):
        if any("." in name for name in path):  # a free key, which no override can name
            continue
        key = ".".join(path)
        if isinstance(value, list):
            entries = [str(entry) if referred_keys(entry) else "" for entry in value]
            if any(entries):
                references[key] = entries
        elif referred_keys(value):
            references[key] = value
    return references


def referred_keys(value: Any) -> set[str]:
    """Return the dotted keys to which a value refers; none if it also has a secret or refers to anything else.

    References to `name` do not count, since each run has another one.
    """
    if not isinstance(value, str) or redact_text(value) != value:
        return set()
    keys = set(re.findall(_REFERENCE, value))
    refers_elsewhere = "${" in re.sub(_REFERENCE, "", value)  # such as `${oc.env:HOME}`, or escaped
    if refers_elsewhere or "name" in keys:
        return set()
    return keys


def _sources(source: str | Path, cluster: str | Path | None) -> tuple[Path, dict[str, Any], ParamTexts, Origins]:
    """Return path, values, texts of `params` and origins of a config file to which a site's profile is added."""
    path = document.find_config(source)
    origins = Origins()
    tree, texts = _read_yaml(path)
    if path in document.shipped_configs().values():
        _locate_script(tree, path.parent)
    if cluster is not None:
        site = document.find_config(cluster, "cluster")
        origins = dict.fromkeys(_add_profile(tree, _read_profile(site)), str(site))
    return path, tree, texts, origins


def _locate_script(tree: dict[str, Any], folder: Path) -> None:
    """Make the path of a shipped config's script absolute, which is relative to the config."""
    trainer = tree.get("trainer")
    script = trainer.get("script") if isinstance(trainer, dict) else None
    if script and script[0].startswith("../"):
        script[0] = str((folder / script[0]).resolve())


def _add_profile(tree: dict[str, Any], profile: dict[str, Any]) -> list[str]:
    """Add the values of a site's profile that a config does not set itself. Returns their dotted keys."""
    added: list[str] = []
    for section in (tree.get("cluster"), profile):
        document.split_gpus(section)

    def with_theirs(section: str, mine: Any, theirs: Any) -> Any:
        if isinstance(mine, dict) and isinstance(theirs, dict):
            added.extend(f"{section}.{key}" for key in theirs if key not in mine)
            return {**theirs, **mine}
        if not mine:  # theirs is a mistake, which the checks of all sections find
            added.append(section)
        return mine or theirs

    # A site's profile may contain the container runtime and the location of images.
    container = profile.pop("container", None)
    if container:
        tree["container"] = with_theirs("container", tree.get("container") or {}, container)
    own_cluster = tree.get("cluster") or {}
    cluster = with_theirs("cluster", own_cluster, profile)
    tree["cluster"] = cluster
    if isinstance(own_cluster, dict) and "environment" in profile:
        # A section inside the section, merged by key as well.
        own_environment = own_cluster.get("environment")
        if isinstance(own_environment, dict):
            cluster["environment"] = with_theirs("cluster.environment", own_environment, profile["environment"])
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
    tree, texts = stored_document(path)
    tree = without_removed_defaults(tree)
    secrets = restore_secrets(tree, env, without=given, require=require_secrets, source=source)
    config = exact(tree)
    with _hidden_values(tree):
        if config is not None and not overrides:
            return _resolve(replace(config, secret_texts=secrets, param_texts=texts), source)
        config = _with_overrides(document.escaped(tree), texts, overrides, source, Origins())
    return replace(config, secret_texts={**secrets, **config.secret_texts})


def _with_overrides(
    tree: dict[str, Any],
    texts: ParamTexts,
    overrides: Sequence[str],
    source: str,
    origins: Origins,
    code: Path | None = None,
) -> Config:
    """Return the config of plain containers and overrides. Raises ConfigError; its text has no secrets."""
    document.split_gpus(tree.get("cluster"))
    with _hidden_values(tree):
        malformed = _add_overrides(overrides, tree, origins)
        try:
            config = _resolve(_merge(tree, malformed, source, is_new=code is not None), source)
            config = replace(config, param_texts=_overridden_texts(texts, overrides))
            if code is None:
                return config
            return with_params(config, code, source)
        except ConfigError as error:
            raise _located(error, origins) from None


def _located(error: ConfigError, origins: Origins) -> ConfigError:
    """Return the error with the command line or the site's profile before the mistakes in their values.

    A line begins with its key, may name another one that conflicts with it, and ends with `: ` and the fix.
    """

    def origin(line: str) -> str:
        keys = [key for key in origins if re.match(rf"{re.escape(key)}(?![\w-])", line)]
        if not keys:
            problem = line.rpartition(": ")[0] or line
            dotted = (key for key in origins if "." in key)  # others, such as `name`, are words of sentences, too
            keys = [key for key in dotted if re.search(rf"(?<![\w.-]){re.escape(key)}(?![\w.-])", problem)]
        if not keys:
            return error.source
        return origins[max(keys, key=len)]

    places = [origin(line) for line in error.problems]
    if len(set(places)) == 1:
        return ConfigError(*error.problems, source=places[0])
    lines = []
    for place, line in zip(places, error.problems, strict=True):
        if place == error.source:
            lines.append(line)
        else:
            lines.append(f"{place}: {line}")
    return ConfigError(*lines, source=error.source)


@contextmanager
def _hidden_values(tree: Mapping[str, Any]) -> Iterator[None]:
    """Remove secrets, and values from the environment, from the errors that the block raises."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*hide_values(error.problems, tree, os.environ), source=error.source) from None


def _read_yaml(path: Path) -> tuple[dict[str, Any], ParamTexts]:
    """Return the values of a config file, and the texts of those in `params`."""
    tree, texts = document.read_document(path)
    raw_params = None
    if isinstance(texts, dict):
        raw_params = texts.get("params")
    return unstamped(as_written(tree, texts), path), dict(texts_of(tree.get("params"), raw_params))


def _overridden_texts(texts: ParamTexts, overrides: Sequence[str]) -> ParamTexts:
    """Return the texts of `params` after overrides, each of which replaces those at and below its key."""
    remaining = dict(texts)
    for override in overrides:
        key, _, raw = override.partition("=")
        section, *path = key.split(".")
        if section != "params":
            continue
        remaining = {keys: text for keys, text in remaining.items() if list(keys[: len(path)]) != path}
        value, raw_texts = _parsed(raw)
        remaining |= texts_of(value, raw_texts, tuple(path))
    return remaining


def _read_profile(path: Path) -> dict[str, Any]:
    """Return the values of a site's profile: the keys of `cluster`, and the section `container`."""
    tree, texts = document.read_document(path)
    tree = as_written({"cluster": tree}, {"cluster": texts})["cluster"]
    return unstamped(as_written(tree, texts), path)  # for its section `container`


def _merge(tree: dict[str, Any], malformed: Sequence[str], source: str, *, is_new: bool) -> Config:
    """Return the config of plain containers, with interpolations resolved. Raises ConfigError.

    Args:
        is_new: whether the config is for a new run, which takes the sizes of a model from its weights.
    """
    problems = list(malformed)
    document.expand_short_forms(tree)
    unfit = list(document.unfit_values(tree))
    if unfit:
        raise ConfigError(*problems, *unfit, source=source)
    merged = _overlay(_defaults(), tree)
    secret_texts: SecretTexts = {}
    resolved = _interpolated(merged, problems, secret_texts)
    document.split_gpus(resolved.get("cluster"))
    if is_new:
        problems += _add_values_of_weights(resolved, tree)
    config, mistakes = convert(resolved)
    for mistake in mistakes:
        if isinstance(mistake, str):
            problems.append(mistake)
        else:
            key, value = mistake
            problems += _sentences(key, value)
    if problems:
        raise ConfigError(*problems, source=source)
    sections = {}
    for name, section in config.sections.items():
        if name in tree or name == config.trainer.target:
            sections[name] = section
    config = replace(config, sections=sections, secret_texts=secret_texts)
    if find_trainer(config.trainer.target) is None or config.trainer.script:
        # The metrics of the user's own code are unknown, so the default metric may be missing.
        monitor = (tree.get("checkpoint") or {}).get("monitor", "")
        config = replace(config, checkpoint=replace(config.checkpoint, monitor=monitor))
    return config


def _add_values_of_weights(resolved: dict[str, Any], tree: Mapping[str, Any]) -> list[str]:
    """Set the keys that the weights of `model.init_from` determine; return a line for each that `tree` contradicts.

    These are keys of a shipped trainer's section, such as the sizes of a model in Hugging Face's format.
    """
    name = _at(resolved, ("trainer", "target"))
    source = _at(resolved, ("model", "init_from"))
    if not isinstance(name, str) or not isinstance(source, str) or not source:
        return []
    trainer = find_trainer(name)
    path = Path(os.path.expanduser(source), HUGGING_FACE_CONFIG)
    if trainer is None or trainer.values_of_weights is None or not path.is_file():
        return []
    try:
        content = json.loads(read_regular(path, document.MAX_BYTES))
        values = trainer.values_of_weights(content)
    except ConfigError as error:
        return [f"model.init_from: {path}: {line}" for line in error.problems]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return [f"model.init_from: {path} cannot be read ({type(error).__name__}: {str(error)[:200]})"]
    problems = []
    for keys, value in document.leaves(values):
        written = _at(resolved, (name, *keys))
        if _at(tree, (name, *keys)) is None:
            document.insert(resolved, [name, *keys], value)
        elif written != value:
            key = ".".join((name, *keys))
            problems.append(f"{key} is {shown(written)}, but the model in {path.parent} has {shown(value)}: remove it")
    return problems


def _add_overrides(overrides: Sequence[str], tree: dict[str, Any], origins: Origins) -> list[str]:
    """Add overrides to a tree, and their keys to `origins`; return a line for each that is malformed."""
    problems = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        path = key.split(".")
        if not equals or not key or key.startswith("-"):
            problems.append(f"{shown(_without_secret(text))} is not an override: write key=value, as in optim.lr=0.01")
            continue
        if raw == REDACTED:
            problems.append(f"{key}: {REDACTED} stands for a redacted secret: write the value, or ${{oc.env:NAME}}")
            continue
        if len(path) > document.MAX_DEPTH:
            problems.append(f"{shown(key)}: nested more than {document.MAX_DEPTH} levels deep")
            continue
        # Find the outermost section that the override creates; the whole path if its section exists.
        num_parts = 1
        while num_parts < len(path) and _at(tree, path[:num_parts]) is not None:
            num_parts += 1
        origins[".".join(path[:num_parts])] = _COMMAND_LINE
        if key == "cluster.gpus_per_node":
            typed = re.fullmatch(document.TYPED_GPUS, raw)
            if typed is not None:
                document.insert(tree, ["cluster", "gpu_type"], typed[1])
                raw = typed[2]
        if not document.insert(tree, path, _override_value(path, raw)):
            problems.append(f"{key}: a part of this path is a value already, not a section")
    given = {text.partition("=")[0] for text in overrides}
    if "cluster.nodes" in given and "cluster.min_nodes" not in given and isinstance(tree.get("cluster"), dict):
        # A new number or range of nodes replaces the old range: the config of a run folder contains both keys.
        tree["cluster"].pop("min_nodes", None)
        origins["cluster.min_nodes"] = _COMMAND_LINE
    origins.update(dict.fromkeys(problems, _COMMAND_LINE))
    return problems


def _without_secret(text: str) -> str:
    """Return an argument such as `password: 123` without its value, if it begins with the name of a secret."""
    name = re.split(r"[:\s]", text, maxsplit=1)[0]
    if name == text or not is_secret_name(name):
        return text
    return f"{name} {REDACTED}"


@functools.cache
def _defaults() -> dict[str, Any]:
    """Return the defaults of all keys, also those of all trainers' sections."""
    defaults = to_tree(Config())
    for name, section in trainer_sections().items():
        defaults[name] = asdict(section())
    return defaults


def _overlay(defaults: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with the defaults of the keys that it lacks, which follow its own keys."""
    merged: dict[str, Any] = {}
    for name, value in tree.items():
        default = defaults.get(name)
        if isinstance(default, Mapping) and isinstance(value, Mapping):
            merged[name] = _overlay(default, value)
        else:
            merged[name] = value
    for name, default in defaults.items():
        merged.setdefault(name, default)
    return merged


def _interpolated(tree: Mapping[str, Any], problems: list[str], secrets: SecretTexts) -> dict[str, Any]:
    """Return a tree with its interpolations resolved; add to `secrets` those that the interpolations have read."""
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError, OmegaConfBaseException
    from omegaconf.resolvers import oc

    read: list[str] = []

    def env(name: str, *default: Any) -> Any:
        value = oc.env(name, *default)
        if value and is_secret_name(name):
            read.append(value)
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # OmegaConf 2.4 has another name for it, which differs in 2.3
        OmegaConf.register_new_resolver("oc.env", env, replace=True)  # OmegaConf's own, which also records secrets
    well_formed: dict[str, Any] = {}
    for path, value in document.leaves(tree):
        try:
            if "${" in str(value):
                OmegaConf.create([value])
            document.insert(well_formed, path, value)
        except (GrammarParseError, RecursionError):  # its message repeats the text
            problems.append(f"{'.'.join(path)}: malformed interpolation")
    config = OmegaConf.create(well_formed)
    resolved: dict[str, Any] = {}
    secrets_in_file = named_secrets(well_formed)
    for path, value in document.leaves(well_formed):
        if "${" in str(value):
            key = ".".join(path)
            try:
                read.clear()
                value = functools.reduce(lambda node, part: node[part], path, config)
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True)
                texts = (*read, *(text for text in secrets_in_file if text in str(value)))
                if texts:
                    secrets[path] = texts
            except RecursionError:
                problems.append(f"{key}: Recursive interpolation detected")
                continue
            except OmegaConfBaseException as error:  # the other lines of its message repeat key and type
                problems.append(f"{key}: {next(iter(str(error).splitlines()), type(error).__name__)}")
                continue
            if isinstance(value, dict) and _at(_defaults(), path):
                problems.append(f"{key} is a section: give it keys, got {shown(value)}")
                continue
        document.insert(resolved, path, value)
    return resolved


def _override_value(path: Sequence[str], text: str) -> Any:
    value, texts = _parsed(text)
    for part in reversed(path):
        value, texts = {part: value}, {part: texts}
    return _at(as_written(value, texts), path)


def _parsed(text: str) -> tuple[Any, Any]:
    """Return the value of an override, and the same with texts instead of values."""
    value = document.parse_value(text)
    if isinstance(value, str):
        return value, text
    return value, document.parse_texts(text)


def _at(tree: object, path: Sequence[str]) -> Any:
    """Return the value at a path of nested mappings; None if there is none."""
    node: Any = tree
    for part in path:
        if not isinstance(node, Mapping):
            return None
        node = node.get(part)
    return node


@functools.cache
def _types() -> dict[str, str]:
    """Return the declared type of each key, by dotted key."""
    return {path: declared_type(section, str(key.type)) for path, section, key in all_keys()}


def _sentences(key: str, value: object) -> list[str]:
    """Return the messages about a key that is unknown, or that has a value of a wrong type."""
    removed = removal(key, value)
    if removed is not None:
        return [removed]
    if key == "cluster.gpus_per_node":
        return [f"{key} must be a number, or TYPE:NUMBER such as a100:4 without spaces, got {shown(value)}"]
    if key == "cluster.time_limit_min" and isinstance(value, str):
        minutes = minutes_of(value)
        if minutes is not None:
            return [f"{key} must be a whole number of minutes, got {shown(value)}: write {math.ceil(minutes)}"]
    known = _types_for(key)
    holder = next((path for path in known if key.startswith(f"{path}.") and known[path].startswith(_CONTAINERS)), "")
    if holder and not key.startswith(_ROLE_REQUESTS):
        known[key] = known[holder].partition("[")[2].removeprefix("str, ").removesuffix("]")
    elif isinstance(value, Mapping) and value and not known.get(key, "").startswith(_CONTAINERS):
        return [line for name, inner in value.items() for line in _sentences(f"{key}.{name}", inner)]
    if known.get(key, "").startswith("Literal["):
        choices = ast.literal_eval(known[key].removeprefix("Literal"))
        return [f"{key} must be one of {', '.join(choices)}, got {shown(value)}"]
    if key in known:
        fix = ""
        if value is None and known[key] == "str":
            fix = """: write '' for an empty string ("''" in a shell)"""  # a shell removes one pair of quotes
        elif known[key].startswith("list[") and isinstance(value, str) and value:
            words = value.split() if key == "trainer.script" else [value]
            fix = f": write [{', '.join(words)}]"
        return [f"{key} must be {known[key]}, got {shown(value)}{fix}"]
    if any(path.startswith(f"{key}.") for path in known):
        return [f"{key} is a section: give it keys, got {shown(value)}"]
    shown_key = key if key.isprintable() else shown(key)
    return [f"{shown_key} is not a key: {_hint_for(key, known)}"]


def _types_for(key: str) -> dict[str, str]:
    """Return the types of all keys; if `key` is one of a role, with its role in the place of ROLE."""
    if not key.startswith(_ROLE_REQUESTS):
        return dict(_types())
    role = key.removeprefix(_ROLE_REQUESTS).partition(".")[0]
    any_role, this_role = f"{_ROLE_REQUESTS}ROLE.", f"{_ROLE_REQUESTS}{role}."
    return {path.replace(any_role, this_role): kind for path, kind in _types().items()}


def _hint_for(key: str, known: Mapping[str, str]) -> str:
    """Return a question for the known key that is nearest to an unknown one."""
    leaf = key.rpartition(".")[2]
    same_leaf = [path for path in known if path.rpartition(".")[2] == leaf]
    if same_leaf:  # the right key in another section, however different
        near = difflib.get_close_matches(key, same_leaf, n=1, cutoff=0.0)
    else:
        sections = {path.partition(".")[0] for path in known if "." in path}
        near = difflib.get_close_matches(key, {*known, *sections}, n=1)
    if not near:
        return "`hpcdist config --schema` lists all keys"
    return f"did you mean {near[0]!r}?"


def _resolve(config: Config, source: str) -> Config:
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
    weights = config.model.init_from
    looks_like_path = weights.endswith(WEIGHT_SUFFIXES) or weights.startswith(("/", "./", "../", "~"))
    if looks_like_path or (weights and Path(weights, HUGGING_FACE_CONFIG).is_file()):  # otherwise the name of a run
        changes["model"] = replace(config.model, init_from=absolute("model.init_from", weights))
    path = config.trainer.script_file
    if path is not None:
        # torchrun resolves the script in the current folder, which differs from that of ranks and of later resumes.
        script = [absolute("trainer.script", str(path)), *config.trainer.script[1:]]
        changes["trainer"] = replace(config.trainer, script=script)
    uri = config.tracking.uri
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        file = absolute("tracking.uri", uri.removeprefix("sqlite:///"))
        changes["tracking"] = replace(config.tracking, uri=f"sqlite:///{file}")
    container = config.container
    image = container.image
    is_path = container.runtime in ("apptainer", "enroot") or image.endswith((".sqsh", ".sif"))
    # pyxis finds other images by name in a registry.
    if image and is_path and "://" not in image:
        image = absolute("container.image", image)
    mounts = []
    for mount in container.mounts:
        if mount.startswith("~"):
            mount = absolute("container.mounts", mount)
        mounts.append(mount)
    changes["container"] = replace(container, image=image, mounts=mounts)
    config = replace(config, **changes)
    if not problems:
        problems = [*document.unfit_values(to_tree(config)), *cross_check(config)]
    if problems:
        raise ConfigError(*problems, source=source)
    return config
