"""`hpcdist rerun`: start a run like another one, follow it to its end, and compare both."""

import typer

from hpcdist.cli import options
from hpcdist.cli.like import load_like
from hpcdist.cli.review import compare_runs
from hpcdist.cli.run import run_here, submit_run

app = typer.Typer()


@app.command()
def rerun(run: options.RunName, overrides: options.Overrides = None) -> int:
    """Repeat a run with its config and code, and compare the new run with it.

    Short for `hpcdist run --like RUN` and `hpcdist compare RUN NEW`. A run of Slurm is submitted again. The code of the
    run is executed: repeat only runs that you trust.

    The exit code is 0 if no logged value differs, and 1 if one does or the new run fails.

    Examples:
        hpcdist rerun ddp-2026
        hpcdist rerun ddp-2026 seed=2
    """
    from hpcdist.run.folder import RunDir
    from hpcdist.run.status import job_of

    other = load_like(run, overrides or [], "rerun")
    if job_of(other.run) is None:
        code = run_here(other.config, origin=other.origin, like=other.run, follow=True)
    else:
        code = submit_run(other.config, {}, other.origin, like=other.run, follow=True)
    if code:
        return code
    are_equal = compare_runs([other.run, RunDir(other.config.folder)])
    return 0 if are_equal else 1
