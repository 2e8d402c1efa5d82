"""The parameters of a run: keys of its config, and the arguments of its script."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hpcdist.config.redaction import redact_tree
from hpcdist.config.schema import INITIAL_WEIGHT_KEYS, is_unused
from hpcdist.config.written import StoredConfig
from hpcdist.run.config_origin import LOCATION, Origin, read_origin
from hpcdist.run.folder import RunDir
from hpcdist.run.sweeps import affects_results

_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
#: An override of Hydra: `lr=0.1`, `+lr=0.1`.
_ASSIGNMENT = re.compile(r"\+{0,2}([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)


def parameters(run: RunDir, stored: StoredConfig) -> dict[str, Any]:
    """Return the redacted parameters of a run by dotted key, by which MLflow compares runs.

    They are the effective values without the keys that do not affect results (`affects_results`), except those that
    the command line has set. `config.yaml` has the others.
    """
    origin = read_origin(run)
    chosen = {}
    for key, value in _effective_keys(stored, origin).items():
        if affects_results(key) or _is_chosen(key, value, origin):
            chosen[key] = value
    return {**chosen, **_arguments(stored)}


def effective_values(run: RunDir, stored: StoredConfig) -> dict[str, Any]:
    """Return the redacted values that apply to a run, by dotted key.

    A run with a shipped trainer has all keys, except those without effect, such as the sections of other trainers. A
    run with the user's own code has the keys of `_set_values`, and the arguments of its script.
    """
    return {**_effective_keys(stored, read_origin(run)), **_arguments(stored)}


def _effective_keys(stored: StoredConfig, origin: Origin | None) -> dict[str, Any]:
    if stored.trainer is not None:
        return _values_with_effect(stored)
    if origin is None:
        return dict(stored.values)
    return _set_values(stored.values, origin, is_script=bool(stored.config.trainer.script))


def _arguments(stored: StoredConfig) -> dict[str, Any]:
    arguments: dict[str, Any] = redact_tree(script_arguments(stored.config.trainer.script))
    return arguments


def _is_chosen(key: str, value: Any, origin: Origin | None) -> bool:
    """Return whether the command line of the start, or of a resume, has set a key."""
    if origin is None or key in (*LOCATION, "experiment"):
        return False
    if value != origin.values.get(key, value):
        return True
    return f"{key}.".startswith(tuple(f"{name}." for name in origin.overridden))


def _values_with_effect(stored: StoredConfig) -> dict[str, Any]:
    values = {}
    for key, value in stored.values.items():
        if is_unused(stored.config.trainer.target, key):
            continue
        if key in INITIAL_WEIGHT_KEYS and not stored.config.model.init_from:
            continue
        if value == {} or key == "trainer.script":
            continue
        if key == "optim.momentum" and stored.config.optim.name != "sgd":
            continue
        values[key] = value
    return values


def _set_values(values: Mapping[str, Any], origin: Origin, *, is_script: bool) -> dict[str, Any]:
    """Return `params`, the trainer or script, the seed of a trainer, and the keys that YAML or an override has set."""
    if is_script:
        always = ["params", "trainer.script", *origin.written]
    else:
        always = ["params", "trainer.target", "seed", *origin.written]
    prefixes = tuple(f"{key}." for key in always)
    chosen = {}
    for key, value in values.items():
        if value == {} or key in (*LOCATION, "experiment"):
            continue
        is_changed = value != origin.values.get(key, value)  # a resume may have changed further keys
        if is_changed or f"{key}.".startswith(prefixes):
            chosen[key] = value
    return chosen


def script_arguments(command: Sequence[str]) -> dict[str, str]:
    """Return the arguments in `[script, argument, …]` by name, as argparse would name them.

    A word after an option without `=` is its value; an option before another option is a flag, which is `true`. Other
    words are `arg1`, `arg2`, …
    """
    arguments: dict[str, str] = {}
    numbers = itertools.count(1)
    flag = ""  # the option before the word, if it may have a value
    num_skipped = 2 if command[:1] == ["-m"] else 1
    for word in command[num_skipped:]:
        option = _OPTION.fullmatch(word)
        assignment = _ASSIGNMENT.fullmatch(word)
        if option:
            name = option[1].replace("-", "_")
            if option[2] is None:
                arguments[name] = "true"
                flag = name
            else:
                arguments[name] = option[2]
                flag = ""
            continue
        if word == "--":
            flag = ""
        elif flag:
            arguments[flag] = word
            flag = ""
        elif assignment:
            arguments[assignment[1]] = assignment[2]
        else:
            arguments[f"arg{next(numbers)}"] = word
    return arguments
