"""Commands for the reviewers of a run: how to load its model, and how to run it again."""

from __future__ import annotations

import shlex

from hpcdist.review.facts import RunFacts
from hpcdist.run.sweep import text_of


def load_commands(facts: RunFacts) -> str:
    """Return lines of Python that load the final model, and the weights of the best checkpoint if that is another one.

    Without a best checkpoint, the newest one is loaded. Empty without any.
    """
    last_step = facts.attempts[-1].last_step if facts.attempts else None
    lines = []
    if facts.has_model and facts.run_id:
        lines += [f"# final model{'' if last_step is None else f', after step {last_step:,}'}"]
        lines += [f'import mlflow; model = mlflow.pytorch.load_model("runs:/{facts.run_id}/model")']
    checkpoint = facts.best or (facts.checkpoints[-1] if facts.checkpoints else None)
    if checkpoint is not None and not (lines and checkpoint.step == last_step):
        lines += [f"# weights of the {'best' if facts.best else 'newest'} checkpoint, step {checkpoint.step:,}"]
        path = str(checkpoint.path)
        lines += [f"from hpcdist.checkpoint.weights import load_weights; state_dict = load_weights({path!r})"]
    return "\n".join(lines)


def run_again_command(facts: RunFacts) -> str:
    """Return the command that starts a run with the same config; empty if it is not recorded."""
    if not facts.config_name or not facts.overrides_known:
        words = facts.command
    else:
        verb = "submit" if facts.launcher == "slurm" else "run"
        profile = ["--cluster", facts.cluster_name] if facts.cluster_name else []
        given = [f"{key}={text_of(item.after)}" for key, item in facts.overrides.items()]
        words = shlex.join(["hpcdist", verb, facts.config_name, *profile, *given])
    return f"cd {shlex.quote(facts.cwd)} && {words}" if words and facts.cwd else words


def rerun_command(facts: RunFacts) -> str:
    """Return the command that repeats a run with its own code and compares the values; empty before its upload."""
    return f"hpcdist rerun {facts.run_id}" if facts.run_id else ""
