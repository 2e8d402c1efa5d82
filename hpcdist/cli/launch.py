"""What commands that start runs have in common: here, in the background, or through Slurm's queue."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hpcdist.cli.options import console, exit_code
from hpcdist.errors import UserMistake

if TYPE_CHECKING:
    from hpcdist.config.schema import Config
    from hpcdist.run.folder import RunDir


def start_here(config: Config, found: RunDir | None = None, *, detach: bool, dry_run: bool) -> int:
    """Show the plan of a run on this machine and, unless it is a dry run, start it; returns the exit code.

    Args:
        config: with the run's name.
        found: an unfinished run of this config, to go on with.
    """
    from hpcdist.cli.render import show_plan
    from hpcdist.machine import compiler
    from hpcdist.machine.own_image import image_facts
    from hpcdist.run import create
    from hpcdist.supervisor.plan import Machine, make_plan
    from hpcdist.tracking.uri import choose_uri

    plan = make_plan(config, Machine.inspect(os.environ))
    if config.model.compile and not config.trainer.script:
        compiler.check(plan.device, {**os.environ, **config.launch.env})
    uri = choose_uri(os.environ, config.tracking.uri, Path(config.runs_dir))
    path = Path(config.runs_dir) / config.experiment / config.name
    show_plan(console(), config, plan, path, uri, verbose=dry_run)
    if plan.device == "cpu" and config.launch.device == "auto":
        inside = " (docker: --gpus all, podman: --device nvidia.com/gpu=all)" if image_facts(os.environ) else ""
        print(f"no GPU is visible{inside}: training on CPUs")
    if dry_run:
        return 0
    if found is not None:
        print(f"goes on with {found.name}, which the same config has started; `--new` starts another run")
    return supervise_here(found or create.create_run(config, Path.cwd()), config, detach=detach)


def comment(text: str) -> str:
    """Text as a comment of a shell script; a folder's name may hold a newline."""
    return "\n".join(f"# {line}" for line in text.splitlines())


def check_plan(config: Config) -> None:
    """Raise UserMistake now for a config that this machine cannot start ranks of."""
    from hpcdist.supervisor.plan import Machine, make_plan

    make_plan(config, Machine.inspect(os.environ))


def send(
    config: Config,
    flags: dict[str, str],
    *,
    follow: bool,
    wait: bool = False,
    dry_run: bool = False,
    test: bool = False,
    force: bool = False,
) -> int:
    """Check a submission to Slurm and, unless it is a dry run or a test, make it; returns the exit code.

    Args:
        config: with the run's name.
        flags: of sbatch, for this submission alone.
    """
    from hpcdist.run import create
    from hpcdist.run.folder import RunDir
    from hpcdist.slurm.job_components import table
    from hpcdist.slurm.submit import checks, submission
    from hpcdist.slurm.submit.batch_script import render

    config, note = submission.settle_het(config)
    who = [*filter(None, [note]), *table(config)]
    if dry_run:
        checks.check_config(config, Path.cwd())
        script, step = render(config, RunDir(Path(config.runs_dir) / config.experiment / config.name), flags)
        print(f"{script}\n# then, in the batch step:\n{comment(step)}\n#\n" + "\n".join(map(comment, who)))
        return 0
    ask_slurm(config, flags, Path.cwd(), force=force)
    print("\n".join(who))
    if test:
        return 0
    run = create.create_run(config, Path.cwd(), launcher="slurm")
    return queue(run, config, flags, follow=follow, wait=wait)


def supervise_here(run: RunDir, config: Config, *, detach: bool) -> int:
    """Supervise a run here or leave it to the background; returns the exit code of the command."""
    from hpcdist import logs
    from hpcdist.cli.render import RunView, show_end
    from hpcdist.supervisor import local_run
    from hpcdist.supervisor.plan import Machine, make_plan

    if detach:
        pid = local_run.detach(run, os.environ)
        print(f"{run.name} runs in the background (process {pid}): `hpcdist logs -f {run.name}` follows it")
        return 0
    logs.configure()
    plan = make_plan(config, Machine.inspect(os.environ))
    terminal = console()
    with RunView(terminal) as view:
        state = local_run.supervise(run, config, plan, view, os.environ)
    show_end(terminal, run, state, config)
    return exit_code(state)


def ask_slurm(config: Config, flags: dict[str, str], cwd: Path | None, *, force: bool) -> None:
    """Check a submission and print what is doubtful, and when it would start; raises for what is wrong."""
    from hpcdist.data.download import missing
    from hpcdist.slurm.submit.checks import check

    doubts, estimate = check(config, flags, cwd, missing_data=missing(config.data), force=force)
    print("\n".join([*(f"note: {doubt}" for doubt in doubts), estimate]))


def submission_flags(config: Config, dependency: str | None, begin: str | None) -> dict[str, str]:
    """Flags of sbatch that belong to one submission, not to the run: no later start of it has them."""
    from hpcdist.slurm.submit.dependency import resolve

    resolved = resolve(dependency, Path(config.runs_dir)) if dependency else None
    chosen = {name: value for name, value in (("dependency", resolved), ("begin", begin)) if value}
    for name, value in chosen.items():
        if not value.isprintable():
            raise UserMistake(f"--{name} must be one line without control characters, got {value[:60]!r}")
    return chosen


def queue(run: RunDir, config: Config, flags: dict[str, str], *, follow: bool, wait: bool = False) -> int:
    """Submit a run to Slurm and let MLflow know; to `follow` it, or only to `wait` for it, is to see it to its end."""
    from hpcdist.cli.watch import see_through
    from hpcdist.run import pending_config
    from hpcdist.slurm.submit import submission
    from hpcdist.supervisor import shipper_process

    try:
        job_id = submission.submit(config, run, flags)
    except UserMistake:  # Slurm has refused the job
        pending_config.drop(run)
        raise
    print(f"{run.name} is job {job_id}: `hpcdist status {run.name}` and `hpcdist follow {run.name}` show it")
    if follow or wait:
        return see_through(run, config, progress=follow)
    print(shipper_process.ship_now(run, config, os.environ))
    return 0
