"""`hpcdist rerun`: repeat a recorded run, and compare the values that both have logged."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcdist.cli import options
from hpcdist.cli.options import argument, flag, option
from hpcdist.cli.run import run_here, submit_run
from hpcdist.config.redaction import redact_text
from hpcdist.containers.spec import DETACHED
from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.host.log_files import say
from hpcdist.host.machine import image_facts, num_cores
from hpcdist.review.text import PATCH

if TYPE_CHECKING:
    from hpcdist.config.schema import Config
    from hpcdist.run.folder import RunDir
    from hpcdist.run.snapshot import CodeSource, CodeState
    from hpcdist.tracking.recorded_run import RecordedRun

app = typer.Typer()


@app.command()
def rerun(
    run: Annotated[
        str, argument("RUN", "Name of a run or its folder; its id in MLflow, or the link to its page.", options.runs)
    ],
    overrides: options.Overrides = None,
    steps: Annotated[
        int | None,
        option("--steps", "N", "Save and stop after step N; the schedule stays that of the whole run.", min=1),
    ] = None,
    dry_run: options.DryRun = False,
    here: Annotated[bool, flag("--here", "Run on this machine, also if the run was submitted to Slurm.")] = False,
    with_current_code: Annotated[
        bool, flag("--with-current-code", "Use the code of the current folder, not that of the run.")
    ] = False,
    repository: Annotated[
        Path | None, option("--repository", "DIR", "A git work tree with the commit of the run.")
    ] = None,
    yes: Annotated[bool, flag("--yes", "Execute what MLflow has recorded, without asking.")] = False,
    compare: Annotated[
        bool, flag("--compare", "Start nothing: compare RUN, a rerun that has ended, with its original.")
    ] = False,
    tolerance: Annotated[
        float, option("--tolerance", "X", "Largest relative difference of equal values; 0 compares exactly.", min=0.0)
    ] = 0.0,
    follow: options.Follow = True,
    force: options.Force = False,
    runs_dir: options.RunsDir = options.RUNS,
    tracking_uri: options.TrackingUri = None,
) -> int:
    """Repeat a run with its code, config and image, and report the first step at which a logged value differs.

    Commit and uncommitted changes, config, number of ranks and image are those of the run. What cannot be restored,
    such as versions of packages, is printed. A run of Slurm is submitted again.

    The code of the run is executed: repeat only runs that you trust. If MLflow alone has the run, everybody who can
    write there can change what is executed: it is shown, and executed after you confirm it, or with `--yes`.

    The exit code is 0 if no compared value differs, and 1 if one does. Metrics of time, speed and hardware are not
    compared.

    Examples:
        hpcdist rerun ddp-2026 --steps 100
        hpcdist rerun 0a1b2c3d4e5f60718293a4b5c6d7e8f9 --tracking-uri http://mlflow:5000 --repository ~/project
        hpcdist rerun ddp-2026-rerun-1a2b --compare
    """
    from hpcdist.run import snapshot
    from hpcdist.run.folder import RunDir
    from hpcdist.run.lookup import resolve_run
    from hpcdist.run.records import RerunRecord, read_origin, write_rerun
    from hpcdist.tracking.recorded_run import find_recorded

    del tracking_uri  # its callback has set HPCDIST_TRACKING_URI
    with tempfile.TemporaryDirectory(prefix="hpcdist-rerun-") as scratch:
        if compare:
            made = resolve_run(run, runs_dir)
            return _compare(_original(made, runs_dir, Path(scratch)), made, tolerance)
        recorded = find_recorded(run, runs_dir, os.environ, Path(scratch))
        on_slurm = recorded.environment.get("launcher") == "slurm" and not here
        config, changed = _config(recorded, overrides or [], runs_dir, steps, on_slurm=on_slurm)
        source = None
        if not with_current_code:
            places = [repository.expanduser()] if repository is not None else [Path(recorded.code.root), Path.cwd()]
            source = snapshot.find_code(recorded.code, recorded.patch, recorded.folder, places)
        missing = _missing(recorded, config, source, on_slurm=on_slurm)
        _show(recorded, config, changed, source)
        for text in missing:
            say(f"not restored: {text}")
        if dry_run:
            return 0
        if recorded.folder is None and not yes:
            if not (sys.stdin.isatty() and sys.stdout.isatty()):
                raise UserMistake(
                    f"the record of run {recorded.run_id} comes from MLflow, not from its run folder, and would be"
                    " executed: check the lines above, then repeat the command on a terminal to confirm, or with --yes"
                )
            say("execute this as your user? [y/N] ", end="")
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                raise typer.Abort

        def restore(made: RunDir) -> CodeState:
            """Write the record of the repeated run, and its code, into the folder of the rerun."""
            record = RerunRecord(
                name=recorded.name,
                folder=str(recorded.folder.path) if recorded.folder is not None else "",
                run_id=recorded.run_id,
                uri=redact_text(recorded.uri),
                missing=missing,
            )
            write_rerun(made, record)
            return snapshot.take(config, made, Path.cwd()) if source is None else source.restore(made, config)

        origin = read_origin(recorded.folder) if recorded.folder is not None else None
        if on_slurm:
            code = submit_run(config, {}, origin, follow=follow, force=force, restore=restore)
        else:
            code = run_here(config, origin=origin, follow=follow, restore=restore)
        if follow and not code:
            return _compare(recorded, RunDir(config.folder), tolerance)
        when = "the rerun did not end as planned" if follow else "when it has ended"
        say(f"{when}: `hpcdist rerun {config.name} --compare` compares its values{' until its end' * follow}")
        return code


def _config(
    recorded: RecordedRun, overrides: Sequence[str], runs_dir: Path, steps: int | None, *, on_slurm: bool
) -> tuple[Config, list[str]]:
    """Return the config of the rerun, and the overrides of the run's config with which it repeats what the run did."""
    from hpcdist.config.loading import load_run_config
    from hpcdist.run.records import kept

    env = {**(kept(recorded.folder) if recorded.folder is not None else {}), **os.environ}
    config = load_run_config(recorded.config, [], env, require_secrets=False)
    changes: dict[str, Any] = {}
    if config.tracking.register_as is not None:
        changes["tracking.register_as"] = None  # a rerun is no new version of the model
    if on_slurm:
        if config.container.runtime in DETACHED and recorded.image_digest.startswith("sha256:"):
            changes["container.image"] = recorded.image_digest  # the name may mean another image now
    else:
        if recorded.world_size and not config.roles and config.launch.num_ranks != recorded.world_size:
            changes["launch.num_ranks"] = recorded.world_size
        cores, was_local = recorded.environment.get("cores"), recorded.environment.get("launcher") != "slurm"
        if was_local and type(cores) is int and cores != num_cores() and not config.launch.num_threads:
            # The number of threads determines the order of sums.
            changes["launch.num_threads"] = max(1, cores // max(1, recorded.world_size))
    if steps is not None:
        changes["stop.pause_at_step"] = steps
    stem = re.sub(r"-rerun-[0-9a-f]{4}$", "", recorded.name)
    place = {"name": f"{stem}-rerun-{secrets.token_hex(2)}", "runs_dir": str(runs_dir.absolute())}
    if recorded.uri and not os.environ.get("HPCDIST_TRACKING_URI"):
        place["tracking.uri"] = recorded.uri
    places, changed = ([f"{key}={json.dumps(value)}" for key, value in one.items()] for one in (place, changes))
    changed += overrides
    return load_run_config(recorded.config, [*places, *changed], env), changed


def _missing(recorded: RecordedRun, config: Config, source: CodeSource | None, *, on_slurm: bool) -> list[str]:
    """Return what differs from the run and cannot be restored, one sentence each."""
    from hpcdist.review.comparison import machine_differences
    from hpcdist.run.snapshot import machine_facts

    found = list(source.missing) if source is not None else ["the code: this is that of the current folder"]
    own = image_facts(os.environ).get("image_digest", "")
    in_container = on_slurm and config.container.runtime != "none"
    if recorded.image and not on_slurm and not (own and own == recorded.image_digest):
        found.append(
            f"the image {recorded.image} ({recorded.image_digest or 'no digest'}): the ranks start outside of it"
        )
    if in_container and not recorded.image_digest:
        found.append(f"the image {config.container.image}: it may have changed, since its digest was not recorded")
    if not in_container:
        copied = source is not None and source.copy is not None
        found += machine_differences(recorded.environment, machine_facts(), code_is_restored=copied)
    return found


def _show(recorded: RecordedRun, config: Config, changed: Sequence[str], source: CodeSource | None) -> None:
    """Print what is repeated, and of a run in MLflow alone the recorded values that determine what is executed."""
    from hpcdist.config.document import flat
    from hpcdist.config.schema import Config as Defaults
    from hpcdist.config.schema import to_tree
    from hpcdist.config.written import read_stored, redacted_argument

    known_as = f" (MLflow run {recorded.run_id})" if recorded.run_id else ""
    say(f"repeats {recorded.experiment}/{recorded.name}{known_as} as {config.experiment}/{config.name}")
    say(f"code: {source.text if source is not None else f'the current folder, {Path.cwd()}'}")
    say("config: as recorded" + (f", except {' '.join(map(redacted_argument, changed))}" if changed else ""))
    if recorded.folder is not None:
        return
    say("from MLflow, where others may have changed them:")
    defaults = flat(to_tree(Defaults()))
    # Sections of a config that name programs, their environment, files or servers, or the number of processes.
    executed = ("trainer", "params", "roles", "data", "tracking", "launch", "cluster", "container", "notify")
    for key, value in read_stored(recorded.config).values.items():
        if key.partition(".")[0] in executed and value != defaults.get(key):
            say(f"  {key}={json.dumps(value, default=str, ensure_ascii=False)}")
    if source is not None:
        # The ranks work in this folder, and import from it if it is outside of the code.
        say(f"  folder of the ranks: {json.dumps(recorded.code.cwd, ensure_ascii=False)}")
    if source is not None and recorded.patch:
        file, lines = recorded.config.with_name(PATCH), len(recorded.patch.splitlines())
        digest = hashlib.sha256(recorded.patch).hexdigest()
        say(f"  code.patch: sha256 {digest}, {lines:,} lines; until you answer, it is {file}")


def _original(made: RunDir, runs_dir: Path, scratch: Path) -> RecordedRun:
    """Return the original that the folder of a rerun names. Raises UserMistake if it is no rerun, or has not ended."""
    from hpcdist.run.folder import ENDED
    from hpcdist.run.records import read_rerun
    from hpcdist.tracking.recorded_run import find_recorded

    record = read_rerun(made)
    if record is None:
        raise UserMistake(f"run {made.name} is not a rerun: `hpcdist compare` compares any runs")
    if (status := made.read_state().status) not in ENDED:
        raise UserMistake(f"run {made.name} is {status}: compare it when it has ended (`hpcdist follow {made.name}`)")
    name = record.folder if record.folder and Path(record.folder).is_dir() else record.run_id
    if not name:
        raise UserMistake(f"the original of run {made.name} is gone: {record.folder} does not exist")
    env = {**os.environ, **({"MLFLOW_TRACKING_URI": record.uri} if record.uri else {})}
    return find_recorded(name, runs_dir, env, scratch)


def _compare(recorded: RecordedRun, made: RunDir, tolerance: float) -> int:
    """Print how a rerun compares, and add it to its folder and to MLflow. Returns the exit code."""
    from hpcdist.review.comparison import compare_values, data_differences
    from hpcdist.review.facts import read_facts
    from hpcdist.run.records import read_rerun, write_rerun
    from hpcdist.tracking.points import read_values
    from hpcdist.tracking.sync_runs import sync_run

    facts, after = read_facts(made), read_values(made)
    status, until = facts.state.status, None
    if status != "finished":  # the last step that it has reported, or logged if it has reported none
        beat = made.attempt(facts.state.attempt).read_beat(0) if facts.state.attempt else None
        until = (beat or {}).get("step") or max((step for points in after.values() for step in points), default=0)
    values = compare_values(
        recorded.values(), after, until=until, exact=recorded.folder is not None, tolerance=tolerance
    )
    notes = data_differences(recorded.datasets, facts.datasets)
    if recorded.image_digest and facts.image_digest not in ("", recorded.image_digest):
        notes.append(f"image: had digest {recorded.image_digest}, has {facts.image_digest}")
    if status not in ("finished", "stopped"):
        notes.append(f"the rerun is {status}: values after its last step are not compared")
    if tolerance:
        notes.append(f"values with a relative difference of at most {tolerance:g} count as equal (--tolerance)")
    for note in notes:
        say(note)
    for difference in values.differences[1:9]:  # the first one is in `values.sentence`
        say(f"also differs from {difference}")
    if values.measured:
        say(f"not compared, since they measure time or hardware: {', '.join(values.measured)}")
    say(values.sentence)
    if (record := read_rerun(made)) is not None:
        write_rerun(made, replace(record, result="; ".join([values.sentence, *notes])))
        try:
            sync_run(made, os.environ)  # the description contains the result
        except (HpcdistError, OSError) as error:
            say(f"the result is not in MLflow yet ({error}): `hpcdist sync {made.name}` uploads it")
    return 0 if values.is_equal else 1
