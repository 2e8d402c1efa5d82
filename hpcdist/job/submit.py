"""Submission of runs to Slurm with submitit, from a login node: the batch script and its parameters."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcdist.config.schema import Config
from hpcdist.config.written import secret_keys
from hpcdist.containers.spec import IMAGE_PYTHON, planned_container, rank_container
from hpcdist.environments.rank_environment import python_of
from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.host.json_files import write_json
from hpcdist.job.srun import option_value, step_command, task_command
from hpcdist.job.submitit_entry import supervise_in_job
from hpcdist.run.folder import RunDir, read_record
from hpcdist.run.snapshot import git_root
from hpcdist.run.status import keep_job
from hpcdist.slurm import client, outer_job
from hpcdist.slurm.output import SlurmError
from hpcdist.slurm.placement import requested_cluster

#: Errors of sbatch after which Slurm may have accepted the job.
_UNANSWERED = re.compile(r"timed out|timeout|zero bytes|connection (?:reset|closed)|unexpected message", re.IGNORECASE)
#: Time for which the controller is asked again whether it has accepted such a job.
FIND_S = 60.0


def submit(config: Config, run: RunDir, flags: Mapping[str, str] | None = None) -> str:
    """Submit a run that has a folder; return the job id, which is also written to `slurm.json` in the folder."""
    (job,) = _submit(config, run, [run], flags or {}, "job", {})
    return str(job.job_id)


def submit_array(
    config: Config, sweep: RunDir, runs: Sequence[RunDir], flags: Mapping[str, str], parallelism: int | None
) -> list[str]:
    """Submit runs that have folders as one job array; return the job ids (`41_0`; `41` for a single run)."""
    array = {"array_parallelism": parallelism or len(runs)}
    jobs = _submit(config, sweep, runs, flags, "job array", array)
    for run, job in zip(runs, jobs, strict=True):
        # The log of an array task is in the sweep's folder.
        log = job.paths.stdout
        log.touch()
        folder = run.path / "submitit"
        folder.mkdir(exist_ok=True)
        (folder / log.name).symlink_to(os.path.relpath(log, folder))
    return [str(job.job_id) for job in jobs]


def _submit(
    config: Config, owner: RunDir, runs: Sequence[RunDir], flags: Mapping[str, str], kind: str, array: Mapping[str, int]
) -> list[Any]:
    """Submit runs as a job, or as an array with submitit's parameters `array`; `owner` has the batch script."""
    from submitit import SlurmExecutor

    executor = SlurmExecutor(owner.path / "submitit", python=SUPERVISOR)
    executor.update_parameters(**sbatch_parameters(config, owner, flags), **array)
    paths = [str(run.path) for run in runs]
    name = f"{owner.experiment}/{owner.name}"
    with _queued(runs, kind, name), outer_job.hidden():
        jobs = executor.map_array(supervise_in_job, paths) if array else [executor.submit(supervise_in_job, *paths)]
    try:
        cluster = client.cluster_name()
    except SlurmError:
        cluster = ""
    # With name and cluster, because ids are not unique over time and clusters.
    record = {"job_name": name, "cluster": cluster}
    for run, job in zip(runs, jobs, strict=True):
        write_json(run.slurm, {"job_id": str(job.job_id), **record})
    return list(jobs)


@contextmanager
def _queued(runs: Sequence[RunDir], job: str, name: str) -> Iterator[None]:
    """Record runs as queued before their submission in the block; restore their records if the submission fails.

    Raises UserMistake if Slurm rejects the job, and HpcdistError if it does not answer.

    Args:
        job: `job` or `job array`, for the error.
        name: Slurm's name of the job.
    """
    from submitit.core.utils import FailedJobError

    before = [(run, run.read_state(), read_record(run.slurm)) for run in runs]
    for run, state, _ in before:
        keep_job(run)
        # Before the status `queued`: a queued run with a previous job that is over counts as lost.
        write_json(run.slurm, {"job_id": None})
        # Before the submission: the job may start before sbatch returns.
        run.write_state(replace(state, status="queued", reason="", ended=None, lost=False))
    try:
        yield
    except (FailedJobError, OSError) as error:
        # Not after Ctrl-C, when Slurm may have accepted the job.
        for run, state, record in before:
            run.write_state(state)
            write_json(run.slurm, record or {"job_id": None})
        if isinstance(error, OSError):
            raise
        text = " ".join(str(error).split())
        if _UNANSWERED.search(text):
            outcome = _withdraw(name)
            raise HpcdistError(f"sbatch got no answer: {text}; {outcome}") from error
        raise UserMistake(f"Slurm rejected the {job}: {text}") from error


def _withdraw(name: str) -> str:
    """Cancel a job by its name after its submission got no answer; returns a sentence about it."""
    try:
        job_ids = client.jobs_named(name, retry_s=FIND_S)
        for job_id in job_ids:
            client.cancel_job(job_id)
    except SlurmError as error:
        look = f"squeue --me --name={name}"
        cancel = f"scancel --user=$USER --name={name}"
        return f"the job may be queued nevertheless ({error}): `{look}` shows it, `{cancel}` cancels it"
    if not job_ids:
        return "no job has been queued: submit again"
    return f"job {', '.join(job_ids)} was queued nevertheless and has been cancelled: submit again"


def require_sbatch() -> None:
    """Raise UserMistake if this machine cannot submit jobs."""
    if shutil.which("sbatch") is None:
        raise UserMistake("sbatch is not installed here: submit from a login node, or show the script with --dry-run")


def estimate_start(config: Config, flags: Mapping[str, str] | None = None) -> str:
    """Return Slurm's estimate of the start of a job, without a submission and without side effects.

    Raises UserMistake if Slurm rejects the job or does not answer.
    """
    require_sbatch()
    probe = RunDir(Path(config.runs_dir) / config.experiment / (config.name or "probe"))
    script, _ = render(config, probe, flags)
    try:
        text = " ".join(client.estimate_start(script).split()).removeprefix("sbatch: ")
        return text.replace(" a using ", " using ")  # Slurm 26.05 prints a stray word after the time
    except SlurmError as error:
        if error.timed_out:
            raise UserMistake(f"Slurm does not answer ({error}): check `scontrol ping`") from error
        reason = " ".join(error.stderr.split()).removeprefix("allocation failure: ").removeprefix("sbatch: error: ")
        raise UserMistake(f"Slurm rejects this job: {reason}") from error


# The batch script of a run and its sbatch parameters. These functions need no Slurm and submit nothing.

#: Shell function of the batch step that runs the supervisor. It restarts a supervisor that is killed (exit code above
#: 128), by a user or for lack of memory, up to three times: the allocation still exists, and the ranks continue from
#: the newest checkpoint. It does not restart it after SIGTERM, to this shell (`trap`) or to the supervisor (143 is 128
#: plus 15). `|| code=$?` because set-up lines of the site may contain `set -e`.
_SUPERVISE = """\
trap 'left=0' TERM
supervise() {
  for left in 3 2 1 0; do
    code=0; %s "$@" || code=$?
    [ $code -gt 128 ] && [ $code -ne 143 ] && [ $left -gt 0 ] || return $code
    echo "the supervisor was killed (exit code $code): restarting it"
  done
}"""

#: The command of the supervisor: Python with a module that calls submitit without importing NumPy.
_PYTHON = f"{shlex.quote(sys.executable)} -u -m hpcdist.job.submitit_entry"
#: Name of the shell function, which submitit calls as if it were the Python interpreter.
SUPERVISOR = "supervise"


def sbatch_parameters(config: Config, run: RunDir, flags: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the parameters of submitit's executor; `flags` are sbatch flags of one submission only."""
    cluster = requested_cluster(config)
    names = ("partition", "account", "qos", "mem", "constraint", "exclude")
    optional = {name: getattr(cluster, name) for name in names} | {"gpus_per_node": cluster.gpu_request}
    most_nodes = cluster.nodes + cluster.spare_nodes
    fewest_nodes = cluster.fewest_nodes + cluster.spare_nodes
    size: dict[str, Any] = {"nodes": most_nodes}
    additional: dict[str, Any] = {}
    if cluster.outlives_nodes:
        # The supervisor goes on without a failed node.
        additional["no_kill"] = True
    additional["requeue"] = True
    if fewest_nodes == most_nodes:
        size |= {"ntasks_per_node": cluster.tasks_per_node, "cpus_per_task": cluster.cpus_per_task}
    else:
        # With --ntasks-per-node, Slurm gives the job at most one node for each task of its least number of nodes.
        # submitit computes with the number of nodes, so the range comes as a flag.
        additional["nodes"] = f"{fewest_nodes}-{most_nodes}"
        additional["mincpus"] = cluster.tasks_per_node * cluster.cpus_per_task
    for name, text in cluster.sbatch.items():
        value = option_value(text)
        if value is not None:
            additional[name] = value
    return {
        **{key: value for key, value in optional.items() if value is not None},
        "job_name": f"{run.experiment}/{run.name}",
        "time": cluster.time_limit_min,
        **size,
        "setup": [*_exports(config), *cluster.setup, _SUPERVISE % _PYTHON],
        # The supervisor runs in the batch step and starts the ranks with srun itself.
        "use_srun": False,
        "stderr_to_stdout": True,
        # submitit sets a workload key by default, which clusters that check these keys reject.
        "wckey": None,
        "signal_delay_s": cluster.signal_lead_s,
        "additional_parameters": {**additional, **(flags or {})},
    }


def _exports(config: Config) -> list[str]:
    """Return the lines of the batch script that set `cluster.env`, without secrets, because Slurm shows scripts."""
    secrets = {path[2] for path in secret_keys(config) if path[:2] == ("cluster", "env")}
    lines = []
    for name, value in config.cluster.env.items():
        if name in secrets:
            lines.append(f"# The supervisor sets {name} from secrets.json in the run folder")
        else:
            lines.append(f"export {name}={shlex.quote(value)}")
    return lines


def render(config: Config, run: RunDir, flags: Mapping[str, str] | None = None, **array: Any) -> tuple[str, str]:
    """Return the batch script, and the command that starts the parents of the ranks; does not need Slurm."""
    from submitit.slurm.slurm import _make_sbatch_string  # submitit has no public function for the text

    folder = run.path / "submitit"
    command = f"{SUPERVISOR} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    parameters = sbatch_parameters(config, run, flags)
    script = _make_sbatch_string(command=command, folder=folder, **parameters, **array)
    cwd = Path.cwd()
    env = outer_job.without_outer_job(os.environ)
    box = rank_container(config, run, env, cwd=cwd, root=git_root(cwd) or cwd)
    python = IMAGE_PYTHON if box else python_of(config)
    step = step_command(config, run.attempt(1), task_command(run, config, python), box)
    return script, shlex.join(step)


def shown_step(config: Config, step: str) -> str:
    """Return the command of `render` as comment lines, with the variables that its container inherits."""
    lines = [step]
    box = planned_container(config, Path.cwd(), outer_job.without_outer_job(os.environ))
    if box is not None:
        lines += box.inherited.lines
    return commented("\n".join(lines))


def commented(text: str) -> str:
    """Return text as comment lines of a shell script; the name of a folder may contain a newline."""
    return "\n".join(f"# {line}" for line in text.splitlines())
