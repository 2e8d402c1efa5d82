"""The parameters of a run: the keys of its config and the arguments of its script that apply to what it does."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hpcdist.config.redaction import redact_tree
from hpcdist.config.schema import find_trainer, unused_sections
from hpcdist.config.tree import flat
from hpcdist.run.folder import RunDir
from hpcdist.run.origin import LOCATION, read_origin

_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
#: An override of Hydra: `lr=0.1`, `+lr=0.1`.
_ASSIGNMENT = re.compile(r"\+{0,2}([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)


def parameters(run: RunDir, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the redacted parameters of a run by dotted key.

    Of a shipped trainer, they are all keys but those in the sections of other trainers. Code of the user's own reads no
    key that hpcdist knows of: its parameters are `params`, the seed, the keys that its YAML or an override has set, and
    the arguments of a script. Without a readable `origin.json`, all keys are parameters.

    Args:
        config: the content of the run's `config.yaml`.
    """
    trainer = config.get("trainer") or {}
    script, target = trainer.get("script") or [], str(trainer.get("target"))
    if not script and find_trainer(target) is not None:
        unused = unused_sections(target)
        return flat({key: value for key, value in config.items() if key not in unused})
    values, origin = flat(config), read_origin(run)
    if origin is not None:
        always = ("params", *(["trainer.script"] if script else ["trainer.target", "seed"]), *origin.written)
        values = {
            key: value
            for key, value in values.items()
            if value != {}
            and key not in (*LOCATION, "experiment")
            # A resume may have changed further keys.
            and (f"{key}.".startswith(tuple(f"{one}." for one in always)) or value != origin.values.get(key, value))
        }
    return values | redact_tree(script_arguments(script))


def script_arguments(command: Sequence[str]) -> dict[str, str]:
    """Return the arguments in `[script, argument, …]` by name, as argparse would name them.

    A word after an option without `=` is taken for its value, and an option before another option for a flag, which
    is `true`. Other words are `arg1`, `arg2`, …
    """
    found: dict[str, str] = {}
    numbers, flag = itertools.count(1), ""
    for word in command[2 if command[:1] == ["-m"] else 1 :]:
        option, assignment = _OPTION.fullmatch(word), _ASSIGNMENT.fullmatch(word)
        if option:
            name = option[1].replace("-", "_")
            found[name] = "true" if option[2] is None else option[2]
            flag = name if option[2] is None else ""
        elif word == "--":
            flag = ""
        else:
            name, value = (assignment[1], assignment[2]) if assignment and not flag else (flag, word)
            found[name or f"arg{next(numbers)}"] = value
            flag = ""
    return found
