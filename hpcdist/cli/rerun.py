"""`hpcdist rerun`: repeat a recorded run, and compare the values that both have logged."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcdist.cli import options
from hpcdist.cli.options import (
    RUNS,
    Begin,
    Dependency,
    DryRun,
    Follow,
    Force,
    Overrides,
    RunsDir,
    TrackingUri,
    Wait,
    argument,
    console,
    flag,
    option,
)
from hpcdist.cli.submit import check_submission, enqueue, submission_flags
from hpcdist.containers.spec import DETACHED
from hpcdist.errors import UserMistake
from hpcdist.host.log_files import say
from hpcdist.host.machine import image_facts, num_cores
from hpcdist.review.text import PATCH
from hpcdist.tracking.uri import redact_uri

if TYPE_CHECKING:
    from hpcdist.config.schema import Config
    from hpcdist.run.folder import RunDir
    from hpcdist.run.snapshot import CodeSource
    from hpcdist.tracking.recorded_run import RecordedRun


app = typer.Typer()

RecordedName = Annotated[
    str, argument("RUN", "Name of a run or its folder; its id in MLflow, or the link to its page.", options.runs)
]

Steps = Annotated[
    int | None,
    option("--steps", "N", "Save and stop after step N; the schedule stays that of the whole run.", min=1),
]
Here = Annotated[bool, flag("--here", "Run on this machine, also if the run was submitted to Slurm.")]
WithCurrentCode = Annotated[
    bool, flag("--with-current-code", "Use the code of the current folder, not that of the run.")
]
Repository = Annotated[Path | None, option("--repository", "DIR", "A git work tree with the commit of the run.")]
Yes = Annotated[bool, flag("--yes", "Execute what MLflow has recorded, without asking.")]
Compare = Annotated[bool, flag("--compare", "Start nothing: compare RUN, a rerun that has ended, with its original.")]
Ignore = Annotated[
    list[str] | None, option("--ignore", "PATTERN", "Metrics not to compare, such as 'gpu/*'; may be repeated.")
]
Tolerance = Annotated[
    float, option("--tolerance", "X", "Largest relative difference of equal values; 0 compares exactly.", min=0.0)
]


@app.command()
def rerun(
    run: RecordedName,
    overrides: Overrides = None,
    steps: Steps = None,
    dry_run: DryRun = False,
    here: Here = False,
    with_current_code: WithCurrentCode = False,
    repository: Repository = None,
    yes: Yes = False,
    compare: Compare = False,
    ignore: Ignore = None,
    tolerance: Tolerance = 0.0,
    follow: Follow = True,
    wait: Wait = False,
    dependency: Dependency = None,
    begin: Begin = None,
    force: Force = False,
    runs_dir: RunsDir = RUNS,
    tracking_uri: TrackingUri = None,
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
    from hpcdist.tracking.recorded_run import find_recorded

    del tracking_uri  # its callback has set HPCDIST_TRACKING_URI
    ignored = tuple(ignore or ())
    with tempfile.TemporaryDirectory(prefix="hpcdist-rerun-") as scratch:
        if compare:
            return _compare(run, runs_dir, Path(scratch), tolerance, ignored)
        recorded = find_recorded(run, runs_dir, os.environ, Path(scratch))
        config, changed = _config(recorded, overrides or [], runs_dir, steps, here=here)
        source = None if with_current_code else _code(recorded, repository)
        plan = _plan(recorded, config, changed, source, here=here)
        _show(plan)
        if dry_run:
            return 0
        if recorded.folder is None and not yes:
            _confirm(recorded.run_id)
        made, code = _start(plan, dependency, begin, follow=follow, wait=wait, force=force)
        return _conclude(
            plan, made, code, is_over=follow or (plan.on_slurm and wait), tolerance=tolerance, ignore=ignored
        )


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """A recorded run, and how it is repeated."""

    recorded: RecordedRun
    config: Config
    changed: Sequence[str]  #: overrides that change the config from that of the run
    source: CodeSource | None  #: None for the code of the current folder
    on_slurm: bool
    missing: Sequence[str]  #: what differs from the run and cannot be restored, one sentence each


def _plan(
    recorded: RecordedRun, config: Config, changed: Sequence[str], source: CodeSource | None, *, here: bool
) -> _Plan:
    on_slurm = _is_slurm(recorded) and not here
    missing = _missing(recorded, config, source, on_slurm=on_slurm)
    return _Plan(recorded=recorded, config=config, changed=changed, source=source, on_slurm=on_slurm, missing=missing)


def _start(
    plan: _Plan, dependency: str | None, begin: str | None, *, follow: bool, wait: bool, force: bool
) -> tuple[RunDir, int]:
    """Start the rerun where the run was. Returns its folder and an exit code."""
    if plan.on_slurm:
        flags = submission_flags(plan.config, dependency, begin)
        return _submit(plan, flags, follow=follow, wait=wait, force=force)
    if dependency or begin:
        raise UserMistake("--dependency and --begin need Slurm, and this run is repeated on this machine")
    return _run_here(plan, follow=follow)


def _conclude(plan: _Plan, made: RunDir, code: int, *, is_over: bool, tolerance: float, ignore: Sequence[str]) -> int:
    """Compare the values of a rerun that has ended, or print how to do it later. Returns the exit code."""
    from hpcdist.cli.rerun_report import compare_rerun, report

    if is_over and not code:
        return report(made, compare_rerun(plan.recorded, made, tolerance=tolerance, ignore=ignore))
    compares = f"`hpcdist rerun {made.name} --compare` compares its values"
    say(f"the rerun did not end as planned: {compares} until its end" if is_over else f"when it has ended: {compares}")
    return code


def _compare(name: str, runs_dir: Path, scratch: Path, tolerance: float, ignored: Sequence[str]) -> int:
    """Compare a rerun that has ended with its original. Returns the exit code."""
    from hpcdist.cli.rerun_report import compare_again, report
    from hpcdist.run.lookup import resolve_run

    made = resolve_run(name, runs_dir)
    return report(made, compare_again(made, runs_dir, scratch, tolerance=tolerance, ignore=ignored))


def _is_slurm(recorded: RecordedRun) -> bool:
    return recorded.environment.get("launcher") == "slurm"


def _config(
    recorded: RecordedRun, overrides: Sequence[str], runs_dir: Path, steps: int | None, *, here: bool
) -> tuple[Config, list[str]]:
    """Return the config of the rerun, and the overrides that change it from that of the run."""
    from hpcdist.config.loading import load_run_config
    from hpcdist.run.records import kept

    env = {**(kept(recorded.folder) if recorded.folder is not None else {}), **os.environ}
    changes = _changes(recorded, load_run_config(recorded.config, [], env, require_secrets=False), here=here)
    if steps is not None:
        changes["stop.pause_at_step"] = steps
    changed = [*(f"{key}={json.dumps(value)}" for key, value in changes.items()), *overrides]
    stem = re.sub(r"-rerun-[0-9a-f]{4}$", "", recorded.name)
    place = {"name": f"{stem}-rerun-{secrets.token_hex(2)}", "runs_dir": str(runs_dir.absolute())}
    if recorded.uri and not os.environ.get("HPCDIST_TRACKING_URI"):
        place["tracking.uri"] = recorded.uri
    words = [f"{key}={json.dumps(value)}" for key, value in place.items()]
    return load_run_config(recorded.config, [*words, *changed], env), changed


def _changes(recorded: RecordedRun, config: Config, *, here: bool) -> dict[str, Any]:
    """Return the values that differ from the run's config so that the rerun repeats what the run did."""
    found: dict[str, Any] = {}
    if config.tracking.register_as is not None:
        found["tracking.register_as"] = None  # a rerun is no new version of the model
    if _is_slurm(recorded) and not here:
        if config.container.runtime in DETACHED and recorded.image_digest.startswith("sha256:"):
            found["container.image"] = recorded.image_digest  # the name may mean another image now
        return found
    if recorded.world_size and not config.roles and config.launch.num_ranks != recorded.world_size:
        found["launch.num_ranks"] = recorded.world_size
    cores = recorded.environment.get("cores")
    if not _is_slurm(recorded) and type(cores) is int and cores != num_cores() and not config.launch.num_threads:
        # The number of threads determines the order of sums.
        found["launch.num_threads"] = max(1, cores // max(1, recorded.world_size))
    return found


def _code(recorded: RecordedRun, repository: Path | None) -> CodeSource:
    from hpcdist.run.snapshot import find_code

    places = [Path(recorded.code.root), Path.cwd()] if repository is None else [repository.expanduser()]
    return find_code(recorded.code, recorded.patch, recorded.folder, places)


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


def _show(plan: _Plan) -> None:
    from hpcdist.config.written import redacted_argument

    recorded, config, source, changed = plan.recorded, plan.config, plan.source, plan.changed
    known_as = f" (MLflow run {recorded.run_id})" if recorded.run_id else ""
    say(f"repeats {recorded.experiment}/{recorded.name}{known_as} as {config.experiment}/{config.name}")
    say(f"code: {source.text if source is not None else f'the current folder, {Path.cwd()}'}")
    say("config: as recorded" + (f", except {' '.join(map(redacted_argument, changed))}" if changed else ""))
    if recorded.folder is None:
        _show_executed(recorded, source)
    for text in plan.missing:
        say(f"not restored: {text}")


#: Sections of a config that name programs, their environment, files or servers, or the number of processes.
_EXECUTED = ("trainer", "roles", "data", "tracking", "launch", "cluster", "container", "notify")


def _show_executed(recorded: RecordedRun, source: CodeSource | None) -> None:
    """Print the recorded values that determine what is executed, as MLflow has them, and the hash of the patch."""
    from hpcdist.config.schema import Config, to_tree
    from hpcdist.config.tree import flat
    from hpcdist.config.written import read_stored

    say("from MLflow, where others may have changed them:")
    defaults = flat(to_tree(Config()))
    for key, value in read_stored(recorded.config).values.items():
        if key.partition(".")[0] in _EXECUTED and value != defaults.get(key):
            say(f"  {key}={json.dumps(value, default=str, ensure_ascii=False)}")
    if source is not None and recorded.patch:
        file, lines = recorded.config.with_name(PATCH), len(recorded.patch.splitlines())
        digest = hashlib.sha256(recorded.patch).hexdigest()
        say(f"  code.patch: sha256 {digest}, {lines:,} lines; until you answer, it is {file}")


def _confirm(run_id: str) -> None:
    """Ask whether to execute what was shown. Raises UserMistake without a terminal, Abort if the answer is not yes."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserMistake(
            f"the record of run {run_id} comes from MLflow, not from its run folder, and would be executed: check the"
            " lines above, then repeat the command on a terminal to confirm, or with --yes"
        )
    say("execute this as your user? [y/N] ", end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise typer.Abort


def _create(plan: _Plan, config: Config, launcher: str) -> RunDir:
    """Create the run folder with the code of the recorded run; remove it if that fails."""
    from hpcdist.run import create
    from hpcdist.run.records import RerunRecord, read_origin, write_rerun

    recorded, source = plan.recorded, plan.source
    made = create.create_run(
        config,
        Path.cwd(),
        launcher=launcher,
        origin=read_origin(recorded.folder) if recorded.folder is not None else None,
        restore=partial(source.restore, config=config) if source is not None else None,
    )
    try:
        create.check_restored(made, config)
        record = RerunRecord(
            name=recorded.name,
            folder=str(recorded.folder.path) if recorded.folder is not None else "",
            run_id=recorded.run_id,
            uri=redact_uri(recorded.uri),
            missing=list(plan.missing),
        )
        write_rerun(made, record)
    except BaseException:
        shutil.rmtree(made.path)
        raise
    return made


def _run_here(plan: _Plan, *, follow: bool) -> tuple[RunDir, int]:
    """Start the rerun on this machine. Returns its folder and the exit code of its supervision."""
    from hpcdist.cli.render import show_plan
    from hpcdist.cli.run import resolve_start, supervise_here

    config = plan.config
    start, uri = resolve_start(config)
    show_plan(console(), config, start, config.folder, uri, verbose=False)
    made = _create(plan, config, "local")
    return made, supervise_here(made, config, start, uri, follow=follow)


def _submit(plan: _Plan, flags: dict[str, str], *, follow: bool, wait: bool, force: bool) -> tuple[RunDir, int]:
    """Submit the rerun to Slurm. Returns its folder and an exit code."""
    from hpcdist.slurm.job.submit import resolve_het

    config, note = resolve_het(plan.config)
    if note:
        say(note)
    check_submission(config, flags, None, force=force)
    made = _create(plan, config, "slurm")
    return made, enqueue(made, config, flags, follow=follow, wait=wait)
