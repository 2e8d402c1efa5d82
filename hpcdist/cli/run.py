"""Commands that start runs or print their configs: `run`, `submit`, `resume`, `config`, and two hidden ones."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdist.cli import options
from hpcdist.cli.like import load_copied, load_like, words_like
from hpcdist.cli.options import console, exit_code, flag, named, option, with_script
from hpcdist.errors import MAX_SHOWN, ConfigError, ImageError, UserMistake
from hpcdist.host.log_files import say
from hpcdist.host.ownership import require_trusted

if TYPE_CHECKING:
    from hpcdist.cli.run_views import RunView
    from hpcdist.config.schema import Config
    from hpcdist.containers.local_container import LocalContainer
    from hpcdist.run.config_origin import Origin
    from hpcdist.run.folder import RunDir
    from hpcdist.run.script_ranks import Spawn
    from hpcdist.supervisor.plan import Plan

app = typer.Typer()
#: Changed files that `resume` names: enough to recognize a change, without filling the terminal after a large one.
_MAX_CHANGED_FILES = 5
Resume = Annotated[
    bool | None,
    typer.Option(
        "--resume/--new",
        envvar="HPCDIST_RESUME",
        help="Continue the unfinished run of this config, if there is one. Default in hpcdist's images.",
    ),
]


def require_config(config: str | None) -> str:
    """Return the argument CONFIG. Raises UserMistake if it was left out."""
    from hpcdist.config.document import shipped_configs

    if config is None:
        raise UserMistake(f"CONFIG is missing: shipped configs are {', '.join(shipped_configs())}")
    return config


@app.command(cls=options.ScriptCommand)
def run(
    config: options.OptionalConfigName = None,
    overrides: options.Overrides = None,
    like: options.LikeRun = None,
    sweep: options.SweepAxes = None,
    repeat: options.Repeat = None,
    dry_run: options.DryRun = False,
    follow: options.Follow = True,
    resume: Resume = None,
    engine: Annotated[str | None, option("--in", "ENGINE", "Run in a container of docker or podman.")] = None,
    image: Annotated[str, option("--image", "IMAGE", "Image for --in.")] = "hpcdist",
) -> int:
    """Start a run on this machine.

    Instead of CONFIG, or after it, give a script `train.py` or a module `-m package.module`. Options of hpcdist and
    KEY=VALUE precede it; all words after it belong to the script.

    Examples:
        hpcdist run ddp_digits
        hpcdist run mnist.yaml data.root=~/data optim.lr=0.01 launch.num_ranks=4
        hpcdist run launch.num_ranks=4 train.py --lr 0.1
        hpcdist run ddp_mnist --detach
        hpcdist run ddp_digits --sweep optim.lr=0.1,0.01 --repeat 3
        hpcdist run ddp_mnist --in docker
        hpcdist run --like ddp-2026 optim.lr=0.01
    """
    from hpcdist.config.loading import load_config
    from hpcdist.run import create
    from hpcdist.run.config_origin import load_origin
    from hpcdist.run.lookup import find_unfinished
    from hpcdist.run.sweeps import with_repetitions

    if like is not None:
        exclusive = {"--sweep": sweep, "--repeat": repeat, "--in": engine}
        other = load_like(like, words_like(config, overrides, exclusive), "run --like")
        return run_here(other.config, origin=other.origin, like=other.run, follow=follow, dry_run=dry_run)
    config, words = with_script(require_config(config), overrides)
    axes = with_repetitions(sweep, repeat, words)
    if axes:
        return _run_sweep(config, words, axes, in_container=engine is not None, follow=follow, dry_run=dry_run)
    unnamed = load_config(config, words)
    create.check_trainer(unnamed, Path.cwd(), own_python=engine is not None)
    if engine is not None:
        if not follow:
            raise UserMistake("--detach and --in exclude each other: the container runs in the foreground")
        return _run_in_container(config, words, unnamed, engine=engine, image=image, resume=resume, dry_run=dry_run)
    origin = load_origin(config, words)
    if resume and not dry_run:
        unfinished = find_unfinished(unnamed)
        if unfinished is not None:
            return run_here(replace(unnamed, name=unfinished.name), unfinished, origin, follow=follow)
    return run_here(create.with_name(unnamed), origin=origin, follow=follow, dry_run=dry_run)


def _run_sweep(
    config: str, words: Sequence[str], axes: Sequence[str], *, in_container: bool, follow: bool, dry_run: bool
) -> int:
    """Run a sweep on this machine. Returns the exit code. Raises UserMistake for options that a sweep does not have."""
    from hpcdist.cli.local_sweep import run_sweep
    from hpcdist.cli.sweep import read_sweep

    if in_container:
        raise UserMistake("--sweep and --in exclude each other: start the cells in containers one by one")
    if not follow:
        raise UserMistake("--sweep and --detach exclude each other: run the sweep in the background with nohup or tmux")
    return run_sweep(read_sweep(config, words, axes), dry_run=dry_run)


def run_here(
    config: Config,
    unfinished: RunDir | None = None,
    origin: Origin | None = None,
    *,
    like: RunDir | None = None,
    follow: bool,
    dry_run: bool = False,
) -> int:
    """Print the plan of a run on this machine and, unless it is a dry run, start it. Returns the exit code.

    Args:
        unfinished: a run of this config to continue instead of a new one.
        origin: the config that the command line names, and its overrides.
        like: the run to take the code from.
    """
    from hpcdist.config.schema import new_run_problems
    from hpcdist.run import create
    from hpcdist.tracking.weight_source import find_weights

    spawn = _find_spawn(config, unfinished or like)
    plan, uri = resolve_start(config, spawn)
    weights = None
    if unfinished is None:
        weights = find_weights(config, os.environ)
        problems = new_run_problems(config, plan.num_ranks)
        if problems:
            raise ConfigError(*problems)

    def show() -> None:
        from hpcdist.cli.run_views import show_plan
        from hpcdist.host.image_identity import image_facts

        show_plan(console(), config, plan, config.folder, uri, verbose=dry_run)
        if plan.device == "cpu" and config.launch.device == "auto":
            advice = ""
            if image_facts(os.environ):
                advice = " (docker: --gpus all, podman: --device nvidia.com/gpu=all)"
            say(f"no GPU is visible{advice}: training on CPUs")
        if spawn is not None:
            say(f"{spawn.sentence}: hpcdist starts it once")
        if origin is not None and like is None:
            warn_of_unread_keys(config, origin)
        if unfinished is not None and not dry_run:
            say(f"continuing run {unfinished.name}, which has the same config; `--new` starts another run")

    if dry_run:
        show()
        return 0
    run = unfinished
    if run is None:
        run = create.create_run(config, Path.cwd(), origin=origin, like=like, weights=weights)
    return supervise_here(run, config, plan, uri, follow=follow, show=show)


def _run_in_container(
    source: str,
    overrides: Sequence[str],
    config: Config,
    *,
    engine: str,
    image: str,
    resume: bool | None,
    dry_run: bool,
) -> int:
    """Print the engine's command line for a run and execute it; the hpcdist in the container names the run."""
    from hpcdist.config.document import find_config
    from hpcdist.config.loading import load_config
    from hpcdist.config.written import redacted_argument
    from hpcdist.containers.local_container import run_words, without_secrets
    from hpcdist.run.folder import claim

    file = find_config(source).absolute() if Path(source).expanduser().is_file() else None
    spec = _container(file, config, engine, image, dry_run=dry_run)
    overrides, variables = without_secrets(overrides)
    spec = replace(spec, env=(*spec.env, *variables))
    command = [*run_words(spec), "run", str(file or source), *overrides]
    # The folders that a config sets, as absolute paths: `~` and relative paths differ inside.
    default = load_config("ddp_digits", [])
    if config.runs_dir != default.runs_dir:
        command.append(f"runs_dir={config.runs_dir}")
    if config.data.root != default.data.root:
        command.append(f"data.root={config.data.root}")
    if resume is not None:
        command.append("--resume" if resume else "--new")
    if not spec.gpus and config.launch.device != "cpu":
        say("no GPU is visible: training on CPUs")
    for line in spec.notes:
        say(f"note: {line}")
    say(shlex.join(map(redacted_argument, command)))
    if dry_run:
        return 0
    claim(Path(config.runs_dir).expanduser().absolute())
    for mount in spec.mounts:
        # The engine would create missing folders as root. Only folders of the run can be missing.
        if not Path(mount.source).exists():
            Path(mount.source).mkdir(parents=True, exist_ok=True)
    return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode


def _container(file: Path | None, config: Config, engine: str, image: str, *, dry_run: bool) -> LocalContainer:
    """Return the container of a run, with the mounts that it needs.

    Raises UserMistake, or ImageError unless it is a dry run.

    Args:
        file: the file of the config; None for a shipped config.
    """
    from hpcdist.containers.engine import find_engine
    from hpcdist.containers.images import inspect, require_driver, require_fit
    from hpcdist.containers.local_container import local_container
    from hpcdist.containers.mounts import Mount, without_nested
    from hpcdist.host.gpu_info import driver_version
    from hpcdist.run.lease import user_name
    from hpcdist.run.snapshot import is_own
    from hpcdist.supervisor.plan import Machine

    if engine not in ("docker", "podman"):
        raise UserMistake(f"--in must be docker or podman, got {engine!r}")
    program = find_engine(engine)
    try:
        facts = inspect(program, image)
        require_fit(facts)
    except ImageError as error:
        if not dry_run:
            raise
        facts = None
        say(f"hpcdist: {error}", error=True)  # only the image's digest is missing in the plan
    # The user's own code is imported from the current folder; a shipped trainer and its config are in the image.
    cwd = Path.cwd()
    spec = local_container(
        program.name,
        image,
        facts.digest if facts else "",
        user_name(),
        config,
        cwd,
        own_code=file is not None or is_own(config),
        num_gpus=Machine.inspect(os.environ).num_gpus,
        env=os.environ,
        rootless_daemon=program.is_rootless_daemon(),
    )
    shown = [path.parent for path in (file, config.trainer.script_file) if path is not None]
    weights = Path(config.model.init_from)
    if weights.is_absolute() and weights.exists():  # otherwise the name of a run or model, or an error inside
        shown.append(weights)
        if weights.is_dir():  # in the cache of Hugging Face's hub, the files are links to another folder
            shown += sorted({file.resolve().parent for file in weights.iterdir() if file.is_symlink()})
    mounts = [*spec.mounts, *(Mount(source=str(path), target=str(path)) for path in shown)]
    spec = replace(spec, mounts=without_nested(mounts))
    if spec.gpus and facts:
        require_driver(facts, driver_version())
    return spec


def _find_spawn(config: Config, run: RunDir | None) -> Spawn | None:
    """Return the call by which the script of a config starts its own ranks, if it does.

    Args:
        run: the run with the copy of the code that is used; None for the code in the current folder.
    """
    from hpcdist.run.script_ranks import find_spawn, find_spawn_in_copy

    if not config.trainer.script:
        return None
    if run is None:
        return find_spawn(config, [Path.cwd()])
    return find_spawn_in_copy(config, run)


def resolve_start(config: Config, spawn: Spawn | None) -> tuple[Plan, str]:
    """Return the plan of a run on this machine, and its tracking URI. Raises UserMistake if it cannot start here.

    Args:
        spawn: the call by which a script starts its own ranks, if it does.
    """
    from hpcdist.environments.torch_check import require_torch
    from hpcdist.host.compiler import require_compiler
    from hpcdist.supervisor.plan import Machine, make_plan
    from hpcdist.tracking.uri import resolve_uri

    require_torch(config, os.environ, on_slurm=False)
    plan = make_plan(config, Machine.inspect(os.environ), spawn)
    uri = resolve_uri(config, os.environ)
    if config.model.compile and not config.trainer.script:
        require_compiler(plan.device, {**os.environ, **config.launch.env})
    return plan, uri


def supervise_here(
    run: RunDir, config: Config, plan: Plan, tracking_uri: str, *, follow: bool, show: Callable[[], None] = lambda: None
) -> int:
    """Supervise a run in this process, or without `follow` in a background process. Returns the exit code.

    Args:
        show: prints the plan, while the parent of the ranks imports torch.
    """
    from hpcdist.host import log_files
    from hpcdist.supervisor import local_launcher

    if not follow:
        show()
        pid = local_launcher.detach(run, os.environ)
        say(f"{run.name} runs in the background (process {pid}): `hpcdist follow {run.name}` shows its progress")
        return 0
    log_files.drop_undelivered_output()
    log_files.configure()

    def view() -> RunView:
        from hpcdist.cli.run_views import RunView  # imports take as long as the rest of the start

        show()
        return RunView(console())

    state = local_launcher.supervise_locally(run, config, plan, view, os.environ, tracking_uri=tracking_uri)
    from hpcdist.cli.run_views import show_end

    show_end(console(), run, state, config)
    return exit_code(state)


@app.command(cls=options.ScriptCommand)
def submit(
    config: options.OptionalConfigName = None,
    overrides: options.Overrides = None,
    like: options.LikeRun = None,
    cluster: options.Cluster = None,
    sweep: options.SweepAxes = None,
    repeat: options.Repeat = None,
    dry_run: options.DryRun = False,
    test: Annotated[bool, flag("--test", "Ask Slurm for the expected start; submit nothing.")] = False,
    follow: options.Follow = False,
    dependency: options.Dependency = None,
    begin: options.Begin = None,
    force: options.Force = False,
    array_parallelism: Annotated[
        int | None, option("--array-parallelism", "N", "Maximum number of cells that run at the same time.", min=1)
    ] = None,
) -> int:
    """Submit a run to Slurm, or a sweep as one job array.

    As for `hpcdist run`, a script and its arguments may take the place of CONFIG.

    Examples:
        hpcdist submit ddp_mnist --cluster devcluster --follow
        hpcdist submit mnist.yaml --cluster ~/site.yaml cluster.nodes=4 --dry-run
        hpcdist submit --cluster ~/site.yaml cluster.nodes=4 train.py --lr 0.1
        hpcdist submit mnist.yaml --cluster ~/site.yaml --dependency afterok:4711 --begin 20:00
        hpcdist submit mnist.yaml --cluster ~/site.yaml --sweep optim.lr=0.1,0.01 --repeat 2
    """
    from hpcdist.cli import sweep as sweeps
    from hpcdist.config.loading import load_config
    from hpcdist.run import create
    from hpcdist.run.config_origin import load_origin
    from hpcdist.run.sweeps import with_repetitions

    flags = submission_flags(dependency, begin)
    source: RunDir | None = None  # the run that gives the new one its code
    if like is not None:
        exclusive = {"--cluster": cluster, "--sweep": sweep, "--repeat": repeat}
        other = load_like(like, words_like(config, overrides, exclusive), "submit --like")
        loaded, origin, source = other.config, other.origin, other.run
    else:
        config, words = with_script(require_config(config), overrides)
        axes = with_repetitions(sweep, repeat, words)
        if array_parallelism is not None and not axes:
            raise UserMistake("--array-parallelism needs --sweep or --repeat")
        if axes:
            cells = sweeps.read_sweep(config, words, axes, cluster)
            check = partial(check_submission, flags=flags, cwd=Path.cwd(), force=force)
            return sweeps.submit_sweep(
                cells, flags, check, parallelism=array_parallelism, dry_run=dry_run, test=test, follow=follow
            )
        loaded = create.with_name(load_config(config, words, cluster=cluster))
        origin = load_origin(config, words, cluster)
    return submit_run(loaded, flags, origin, like=source, follow=follow, dry_run=dry_run, test=test, force=force)


def submit_run(
    config: Config,
    flags: dict[str, str],
    origin: Origin | None = None,
    *,
    follow: bool,
    dry_run: bool = False,
    test: bool = False,
    force: bool = False,
    like: RunDir | None = None,
) -> int:
    """Check a submission to Slurm and, unless it is a dry run or a test, submit it. Returns the exit code.

    Args:
        flags: flags of sbatch for this submission only.
        origin: the config that the command line names, and its overrides.
        like: the run to take the code from.
    """
    from hpcdist.job import submit_checks
    from hpcdist.job.submit import commented, render, shown_step
    from hpcdist.run import create
    from hpcdist.run.folder import RunDir
    from hpcdist.slurm.placement import rank_table_lines
    from hpcdist.tracking.weight_source import find_weights

    ranks = "\n".join(rank_table_lines(config))
    # The trainer of a run like another one is in the copy of its code.
    cwd = Path.cwd() if like is None else None
    weights = find_weights(config, os.environ)
    if dry_run:
        submit_checks.check_config(config, cwd)
        script, step = render(config, RunDir(config.folder), flags)
        say(f"{script}\n# then, in the batch step:\n{shown_step(config, step)}\n#\n{commented(ranks)}")
        return 0
    check_submission(config, flags, cwd, force=force)
    if origin is not None and like is None:
        warn_of_unread_keys(config, origin)
    say(ranks)
    if test:
        return 0
    run = create.create_run(config, Path.cwd(), launcher="slurm", origin=origin, like=like, weights=weights)
    return enqueue(run, config, flags, follow=follow)


def warn_of_unread_keys(config: Config, origin: Origin) -> None:
    """Print a note on keys of the config without effect; not on those of a shipped config, or that others refer to."""
    from hpcdist.config.document import shipped_configs
    from hpcdist.config.written import flat_values
    from hpcdist.run.config_origin import keys_in_references, overrides
    from hpcdist.run.trainer_source import unread_keys

    keys: Sequence[str] = origin.written
    if origin.config in shipped_configs():
        keys = list(overrides(origin, flat_values(config)))
    referred = keys_in_references(origin)
    text = unread_keys(config, [key for key in keys if key not in referred], Path.cwd())
    if text:
        say(f"note: {text}")


def check_submission(config: Config, flags: dict[str, str], cwd: Path | None, *, force: bool) -> None:
    """Check a submission and print warnings and the expected start. Raises UserMistake for errors."""
    from hpcdist.data.download import missing
    from hpcdist.job.submit_checks import check_submission

    warnings, estimate = check_submission(config, flags, cwd, missing_data=missing(config.data), force=force)
    for warning in warnings:
        say(f"note: {warning}")
    if estimate:
        say(estimate)


def submission_flags(dependency: str | None, begin: str | None) -> dict[str, str]:
    """Return the flags of sbatch that apply to one submission and not to later starts of the run."""
    flags = {}
    for name, value in (("dependency", dependency), ("begin", begin)):
        if not value:
            continue
        if not value.isprintable():
            raise UserMistake(f"--{name} must be one line without control characters, got {value[:MAX_SHOWN]!r}")
        flags[name] = value
    return flags


def enqueue(run: RunDir, config: Config, flags: dict[str, str], *, follow: bool) -> int:
    """Submit a run folder to Slurm and create its MLflow run; with `follow`, stay until the run ends."""
    from hpcdist.job import submit as job_submit

    job_id = job_submit.submit(config, run, flags)
    say(f"{run.name} is job {job_id}: `hpcdist follow {run.name}` shows its state and progress")
    # These slow imports come after the submission, so that they do not delay the job.
    if follow:
        from hpcdist.cli.run_views import follow_to_end

        return follow_to_end(run, config)
    from hpcdist.supervisor import children

    say(children.ship_in_background([run], config, os.environ))
    return 0


@app.command()
def resume(
    run: options.OptionalRunName = None,
    overrides: options.Overrides = None,
    with_current_code: Annotated[
        bool, flag("--with-current-code", "Use the current code, not the snapshot of the first start.")
    ] = False,
    follow: options.Follow = True,
    dependency: options.Dependency = None,
    begin: options.Begin = None,
    force: options.Force = False,
) -> int:
    """Continue a run from its newest valid checkpoint, in the same MLflow run.

    A run of Slurm is submitted again. Changed keys also hold for later resumes.

    Examples:
        hpcdist resume
        hpcdist resume runs/digits/first stop.max_epochs=20 --with-current-code
    """
    from hpcdist.run import config_change, create, snapshot
    from hpcdist.run.lease import hold
    from hpcdist.run.lookup import resolve_run
    from hpcdist.run.resume_text import resume_point

    words = list(overrides or [])
    if run is not None and "=" in run and not os.path.exists(run):  # RUN was left out, and this is an override
        words.insert(0, run)
        run = None
    folder = resolve_run(named(run), options.runs_dir())
    require_trusted(folder.path, "resume")
    config = load_copied(folder, words, "resume", Path.cwd() if with_current_code else None)
    _require_resumable(folder, words)
    on_slurm = folder.slurm.exists()
    if not on_slurm and (dependency or begin):
        raise UserMistake(f"--dependency and --begin need Slurm, and run {folder.name} was not submitted to Slurm")
    flags = submission_flags(dependency, begin)
    config_change.check(folder, config)
    if with_current_code:
        create.check_code(config, Path.cwd())
    elif folder.read_state().status == "failed":
        _note_changed_code(folder)
    start = None
    if on_slurm:
        check_submission(config, flags, None, force=force)
    else:
        start = resolve_start(config, _find_spawn(config, None if with_current_code else folder))
    with hold(folder):
        config_change.change_config(folder, config)
        if with_current_code:
            code = snapshot.take(config, folder, Path.cwd())
            snapshot.write_environment(folder, code, launcher="slurm" if on_slurm else "local")
    if on_slurm or not follow:  # else the supervisor prints it
        last_attempt = folder.read_state().attempt
        if last_attempt:
            say(resume_point(folder, folder.attempt(last_attempt), config.trainer.script))
    if start is None:
        return enqueue(folder, config, flags, follow=follow)
    plan, uri = start
    return supervise_here(folder, config, plan, uri, follow=follow)


def _require_resumable(run: RunDir, overrides: Sequence[str]) -> None:
    """Raise UserMistake if a run waits or runs on Slurm, or is finished and no override makes it train longer."""
    from hpcdist.run.status import job_of, status_of

    if job_of(run) is not None:
        status = status_of(run)
        if not status.final:
            raise UserMistake(f"run {run.name} is {status.name} and cannot be resumed: `hpcdist follow {run.name}`")
    if run.read_state().status == "finished" and not overrides:
        raise UserMistake(f"run {run.name} is finished: to train longer, add an override such as stop.max_epochs=20")


def _note_changed_code(run: RunDir) -> None:
    """Print the files that the user has changed since the failed run copied the code: the resume does not use them."""
    from hpcdist.run import snapshot

    files = snapshot.changed_files(snapshot.code_state(run), run)
    if not files:
        return
    names = ", ".join(files[:_MAX_CHANGED_FILES])
    if len(files) > _MAX_CHANGED_FILES:
        names += ", …"
    advice = "this resume runs the copy, --with-current-code runs the new code"
    say(f"changed since the run copied the code: {names}; {advice}")


@app.command("config")
def show_config(
    config: options.OptionalConfigName = None,
    overrides: options.Overrides = None,
    cluster: options.Cluster = None,
    schema: Annotated[
        bool, flag("--schema", "Print every key with type, default and meaning; with CONFIG those of its trainer.")
    ] = False,
    for_editors: Annotated[bool, flag("--json-schema", "Print the JSON Schema of a config.")] = False,
    as_json: options.Json = False,
) -> None:
    """Print a resolved config with secrets redacted, or the schema of all configs.

    Examples:
        hpcdist config ddp_mnist optim.lr=0.01
        hpcdist config --schema
        hpcdist config regression.yaml --schema
        hpcdist config --json-schema > config.schema.json
    """
    from hpcdist.config.document import shipped_configs
    from hpcdist.config.loading import load_config
    from hpcdist.config.written import redacted, to_yaml

    if for_editors:
        from hpcdist.config.describe import json_schema

        say(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    elif schema:
        from hpcdist.config.describe import describe, describe_trainer

        entries = describe()
        if config is not None:
            entries = describe_trainer(load_config(config, overrides or []), Path.cwd())
        keys = [dict(zip(("key", "type", "default", "help"), entry, strict=True)) for entry in entries]
        if as_json:
            say(json.dumps(keys, indent=2, default=str))
            return
        for key in keys:
            say(f"{key['key']}: {key['type']} = {key['default']!r}\n    {key['help']}")
    elif config is None:
        raise UserMistake(f"CONFIG is missing: shipped configs are {', '.join(shipped_configs())}; or use --schema")
    else:
        loaded = load_config(config, overrides or [], cluster=cluster)
        if as_json:
            say(json.dumps(redacted(loaded), indent=2))
        else:
            say(to_yaml(loaded).rstrip("\n"))


@app.command(hidden=True)
def supervise(run_dir: Path) -> int:
    """Supervise a run folder in the foreground; `--detach` starts this command in the background."""
    from hpcdist.config.loading import load_run_config
    from hpcdist.run.folder import RunDir
    from hpcdist.run.kept_secrets import kept

    run = RunDir.open(run_dir)
    require_trusted(run.path, "supervise")
    config = load_run_config(run.config, [], {**os.environ, **kept(run)})
    plan, uri = resolve_start(config, _find_spawn(config, run))
    return supervise_here(run, config, plan, uri, follow=True)


@app.command("in-job", hidden=True)
def in_job(config: options.ConfigName, overrides: options.Overrides = None) -> int:
    """Supervise a run in the Slurm job of this process; `slurm/run.sbatch` starts this command."""
    from hpcdist.config.loading import load_config
    from hpcdist.host import log_files
    from hpcdist.job.batch_step import run_in_job
    from hpcdist.run.config_origin import load_origin

    log_files.configure()
    words = overrides or []
    state = run_in_job(load_config(config, words), os.environ, Path.cwd(), load_origin(config, words))
    # The job of a cancelled run did not fail.
    return exit_code(state) if state.status == "failed" else 0
