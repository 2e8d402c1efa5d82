"""The parameters of a run: the keys of its config that its trainer reads, and the arguments of its script."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

from hpcdist.config.redaction import redact_tree
from hpcdist.config.schema import unused_sections
from hpcdist.config.written import StoredConfig
from hpcdist.run.config_origin import LOCATION, read_origin
from hpcdist.run.folder import RunDir

_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
#: An override of Hydra: `lr=0.1`, `+lr=0.1`.
_ASSIGNMENT = re.compile(r"\+{0,2}([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)


def parameters(run: RunDir, stored: StoredConfig) -> dict[str, Any]:
    """Return the redacted parameters of a run by dotted key.

    Of a shipped trainer, they are all keys but those without effect, as of other trainers' sections. Of the user's own
    code, they are `params`, the seed, the keys that its YAML or an override has set, and the arguments of a script;
    without a readable `origin.json`, all keys.
    """
    script, values, origin = stored.config.trainer.script, stored.values, read_origin(run)
    if stored.trainer is not None:
        unused = unused_sections(stored.config.trainer.target)
        no_effect = {"optim.momentum"} if stored.config.optim.name != "sgd" else set()
        return {k: value for k, value in values.items() if k.partition(".")[0] not in unused and k not in no_effect}
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
    return {**values, **redact_tree(script_arguments(script))}


def script_arguments(command: Sequence[str]) -> dict[str, str]:
    """Return the arguments in `[script, argument, …]` by name, as argparse would name them.

    A word after an option without `=` is its value; an option before another option is a flag, which is `true`. Other
    words are `arg1`, `arg2`, …
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
