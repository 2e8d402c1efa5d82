"""The section Setup of a run's description: what ran, on what, from which code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpcdist.review.facts import RunFacts
from hpcdist.review.markdown import PATCH, escaped, link
from hpcdist.review.text import artifact_page, clock, image_text, more, nodes_text
from hpcdist.run.sweep import text_of
from hpcdist.run.training_record import Dataset

#: Words for `launch.device`; nothing for `auto`.
_DEVICES = {"cpu": " on the CPU", "cuda": " on GPUs"}
#: Overrides beyond these are counted.
_MAX_OVERRIDES = 30


def setup_rows(facts: RunFacts) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the section as Markdown."""
    if facts.config_name:
        profile = f", cluster profile {escaped(facts.cluster_name)}" if facts.cluster_name else ""
        yield "Config", escaped(facts.config_name) + profile
    if facts.overrides:
        shown = [
            f"{escaped(key)} = **{escaped(text_of(item.after), 100)}** (config: {escaped(text_of(item.before), 100)})"
            for key, item in list(facts.overrides.items())[:_MAX_OVERRIDES]
        ]
        yield "Overrides", "<br>".join([*shown, *more(len(facts.overrides) - _MAX_OVERRIDES)])
    elif facts.config_name:
        yield "Overrides", "none"
    if facts.rerun is not None:
        known_as = f" (MLflow run {escaped(facts.rerun.run_id)})" if facts.rerun.run_id else ""
        yield "Repeats", escaped(facts.rerun.name) + known_as
        yield "Not restored", "<br>".join(escaped(text, 300) for text in facts.rerun.missing) or "nothing"
        yield "Values", escaped(facts.rerun.result, 600) or "not compared yet"
    if facts.sweep:
        yield "Sweep", escaped(facts.sweep)
    yield "Trainer", escaped(facts.trainer)
    model = [escaped(facts.model)] if facts.model else []
    if facts.num_parameters is not None:
        model.append(f"{facts.num_parameters:,} trainable parameters")
    if model:
        yield "Model", ", ".join(model)
    if facts.datasets:
        yield "Data", "<br>".join(map(_dataset, facts.datasets))
    if code := _code(facts):
        yield "Code", code
    if image := image_text(facts):
        yield "Image", escaped(image, 600)
    device = _DEVICES.get(str(facts.config.get("launch.device")), "")
    yield "Ranks", f"{facts.state.world_size}{device}{_where(facts)}"
    if versions := _versions(facts):
        yield "Versions", versions
    started = facts.attempts[0].started if facts.attempts else None
    yield (
        "Created" if started is None else "Started",
        clock(started or facts.state.created) + (f" by {escaped(facts.user)}" if facts.user else ""),
    )
    yield "Folder", escaped(f"{facts.host}:{facts.folder}" if facts.host else str(facts.folder))


def _code(facts: RunFacts) -> str:
    """Return the commit of the code, what it does not contain, and code that later edits change."""
    parts = []
    if not facts.config.get("trainer.script") and ":" not in str(facts.config.get("trainer.target", ":")):
        parts.append(f"hpcdist {escaped(facts.versions.get('hpcdist', ''))}".rstrip())
    if facts.git_commit:
        changes = link("uncommitted changes", artifact_page(facts, PATCH)) if facts.has_patch else "uncommitted changes"
        parts.append(f"commit {escaped(facts.git_commit)}" + (f" with {changes}" if facts.git_dirty else ""))
    elif facts.code_copied:
        parts.append("no commit, since it was not in a git repository; the run folder has a copy in `code`")
    if facts.git_commit and (number := facts.num_untracked):
        parts.append(f"{number} file{'s' * (number > 1)} of the copy {'are' if number > 1 else 'is'} not in git")
    if facts.live_code:
        parts.append(f"imported without a copy, so later edits change the run: {nodes_text(facts.live_code)}")
    return "; ".join(parts)


def _versions(facts: RunFacts) -> str:
    """Return the versions that the ranks use, then those of the machine on which the run was created."""
    names = {"hpcdist": "hpcdist", "torch": "torch", "python": "Python", "cuda": "CUDA"}

    def listed(versions: Mapping[str, str]) -> str:
        return escaped(", ".join(f"{name} {versions[key]}" for key, name in names.items() if versions.get(key)))

    own, inside = listed(facts.versions), listed(facts.rank_versions)
    if not facts.rank_python:
        return own
    place = "in the container" if facts.rank_python == "container" else "in the environment of the ranks"
    texts = [f"{inside} {place}" if inside else f"those {place} are recorded when the job starts"]
    return "; ".join([*texts, *([f"{own} on {escaped(facts.host)}"] if own else [])])


def _where(facts: RunFacts) -> str:
    job = f", Slurm job {escaped(facts.job_id)}" if facts.job_id else ""
    nodes = facts.attempts[-1].nodes if facts.attempts else ()
    earlier = [node for attempt in facts.attempts for node in attempt.nodes if node not in nodes]
    others = f" (earlier attempts: {nodes_text(list(dict.fromkeys(earlier)))})" if earlier else ""
    return (f" on {nodes_text(nodes)}" if nodes else "") + others + job


def _dataset(dataset: Dataset) -> str:
    words = [f"{escaped(dataset.name)} ({escaped(dataset.split)})"]
    if dataset.num_samples is not None:
        words.append(f"{dataset.num_samples:,} samples")
    if dataset.digest:
        words.append(f"digest {escaped(dataset.digest)}")
    return ", ".join(words)
