"""Commands for the reviewers of a run: how to load its model, and how to run it again."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from hpcdist.config.redaction import is_redacted
from hpcdist.review.checkpoints import CheckpointFacts
from hpcdist.review.facts import RunFacts
from hpcdist.run.origin import PLAIN_SCRIPT
from hpcdist.run.runs_dir import DATABASE, own_place
from hpcdist.run.sweep import text_of

#: Maximum length of a line of a command. MLflow's page of a run does not wrap code: a long line moves the section
#: `About this run` out of the window.
MAX_LINE = 80
#: Length of the parts of a longer word, which get quotes, an indent or the name of an option.
MAX_PART = 60
#: A word of a command with its quotes; an option together with its value.
_WORD = re.compile(r"""(?:--[\w-]+ (?=[^-]))?(?:'[^']*'|"[^"]*"|\\.|\S)+""")


def load_final_model(facts: RunFacts) -> str:
    """Return lines of Python that load the final model from MLflow; empty before its upload."""
    if not facts.has_model or not facts.run_id:
        return ""
    return f'import mlflow\n\nmodel = mlflow.pytorch.load_model("runs:/{facts.run_id}/model")'


def load_checkpoint(facts: RunFacts, checkpoint: CheckpointFacts) -> str:
    """Return lines of Python that load the weights of a checkpoint, from MLflow if it has them, or from its folder."""
    if checkpoint is facts.best and facts.has_uploaded_best:
        lines = ["import mlflow", "from hpcdist.checkpoint.weights import load_weights", ""]
        lines.append(f'uri = "runs:/{facts.run_id}/checkpoints/best"')
        lines.append("state_dict = load_weights(mlflow.artifacts.download_artifacts(uri))")
    else:
        lines = ["from hpcdist.checkpoint.weights import load_weights", ""]
        lines += [f"folder = {str(checkpoint.path)!r}", "state_dict = load_weights(folder)"]
    return "\n".join(lines)


def run_again_command(facts: RunFacts) -> str:
    """Return the command that starts a run with the same config in the same store; empty if it is not recorded.

    A value that is a secret is `***`.
    """
    if not facts.config_name or not facts.overrides_known:
        words = facts.command
    else:
        verb = "submit" if facts.launcher == "slurm" else "run"
        profile = ["--cluster", facts.cluster_name] if facts.cluster_name else []
        changed = [f"{key}={text_of(item.after)}" for key, item in facts.overrides.items()]
        named, script = [facts.config_name], []
        if facts.config_name == PLAIN_SCRIPT:
            named, script = [], facts.config["trainer.script"]
        words = shlex.join(["hpcdist", verb, *named, *profile, *changed, *_location(facts), *script])
    return _in_folder(facts, words)


def rerun_command(facts: RunFacts) -> str:
    """Return the command that repeats a run with its own code and compares the values; empty before its upload."""
    if not facts.run_id:
        return ""
    words = ["hpcdist", "rerun", facts.run_id]
    for word in _location(facts):
        key, _, value = word.partition("=")
        words += [f"--{key.replace('.', '-').replace('_', '-')}", value]
    return _in_folder(facts, shlex.join(words))


def wrapped(command: str) -> str:
    """Return a command of the shell on lines of at most MAX_LINE characters, as far as possible."""
    if len(command) <= MAX_LINE:
        return command
    lines = [""]
    for word in map(_divided, _WORD.findall(command)):
        if lines[-1].endswith(" &&"):  # the shell reads on without a backslash
            lines.append(word)
        elif lines[-1] and len(lines[-1]) + len(word) + len("  \\") > MAX_LINE and word != "&&":
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
        lines += lines.pop().split("\n")
    return "\n".join(lines)


def _divided(word: str) -> str:
    """Return a long word as parts that the shell joins: a backslash at the end of a line removes the line break."""
    if len(word) + len("     \\") <= MAX_LINE:
        return word
    try:
        *option, text = shlex.split(word)
    except ValueError:  # a quote without its end, in a command that was recorded without quotes
        return word
    parts = []
    while text:
        ends = [text.rfind(mark, MAX_PART // 2, MAX_PART) + 1 for mark in "/, "] if len(text) > MAX_PART else []
        end = max(ends, default=0) or MAX_PART
        parts.append(shlex.quote(text[:end]))
        text = text[end:]
    return " ".join([*option, "\\\n".join(parts)])


def _location(facts: RunFacts) -> list[str]:
    """Return the overrides for the folder and the store of the run, if they are not the default ones of its folder."""
    runs_dir = facts.folder.parent.parent.absolute()
    words = [f"runs_dir={runs_dir}"] if Path(facts.cwd, "runs") != runs_dir else []
    # A redacted password makes the URI useless.
    default = f"sqlite:///{own_place(runs_dir) / DATABASE}"
    is_default = facts.tracking_uri in ("", default) or is_redacted(facts.tracking_uri)
    return words if is_default else [*words, f"tracking.uri={facts.tracking_uri}"]


def _in_folder(facts: RunFacts, command: str) -> str:
    return f"cd {shlex.quote(facts.cwd)} && {command}" if command and facts.cwd else command
