"""Sending a run to Slurm through submitit: what is asked for, checked and submitted. Runs on a login node."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcdist.errors import UserMistake
from hpcdist.launch.batch import supervise_in_job
from hpcdist.launch.plan import rank_command
from hpcdist.launch.step import srun_command
from hpcdist.rundir import RunDir, write_json
from hpcdist.schema import Config


def sbatch_parameters(config: Config, run: RunDir) -> dict[str, Any]:
    """What submitit's executor is told, by sbatch's names."""
    cluster = config.cluster
    optional = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "mem": cluster.mem,
        "constraint": cluster.constraint,
        "exclude": cluster.exclude,
        "gpus_per_node": cluster.gpus_per_node or None,
    }
    return {
        **{key: value for key, value in optional.items() if value is not None},
        "job_name": f"{run.experiment}/{run.name}",
        "time": cluster.time_min,
        "nodes": cluster.nodes,
        "ntasks_per_node": cluster.tasks_per_node,
        "cpus_per_task": cluster.cpus_per_task,
        "setup": [*(f"export {name}={shlex.quote(value)}" for name, value in cluster.env.items()), *cluster.setup],
        # The supervisor runs once, in the batch step, and starts the ranks with an srun of its own.
        "use_srun": False,
        "stderr_to_stdout": True,
        # submitit's default is a workload key, which clusters that check them refuse.
        "wckey": None,
        "signal_delay_s": cluster.signal_lead_s,
        "additional_parameters": {"requeue": True, **cluster.sbatch},
    }


def render(config: Config, run: RunDir) -> tuple[str, str]:
    """The whole batch script and the first attempt's srun line, also where no Slurm is installed."""
    from submitit.slurm.slurm import _make_sbatch_string  # the only way to its text without a submission

    folder = run.path / "submitit"
    command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    script = _make_sbatch_string(command=command, folder=folder, **sbatch_parameters(config, run))
    return script, shlex.join(srun_command(config.cluster, run.attempt(1), rank_command(run.path)))


def check(config: Config) -> str:
    """Ask Slurm, before anything is written, whether it would take such a job, and when it would start.

    Raises UserMistake, in one line, with Slurm's own reason.
    """
    if shutil.which("sbatch") is None:
        raise UserMistake("no sbatch here: submit from a login node, or look at the script with --dry-run")
    probe = RunDir(Path(config.runs_dir) / config.experiment / (config.name or "probe"))
    script, _ = render(config, probe)
    done = subprocess.run(
        ["sbatch", "--test-only"], input=script, capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()).removeprefix("allocation failure: ").removeprefix("sbatch: error: ")
        raise UserMistake(f"Slurm would not take this job: {reason}")
    return " ".join(done.stderr.split()).removeprefix("sbatch: ")


def submit(config: Config, run: RunDir) -> str:
    """Submit a run that is made; returns the job id, which `slurm.json` in its folder keeps."""
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError

    before = run.read_state()
    # First, since the job may start before this process goes on.
    run.write_state(replace(before, status="queued", reason="", ended=None))
    executor = SlurmExecutor(run.path / "submitit")
    executor.update_parameters(**sbatch_parameters(config, run))
    try:
        job = executor.submit(supervise_in_job, str(run.path))
    except FailedJobError as error:
        run.write_state(before)
        raise UserMistake(f"Slurm refused the job: {' '.join(str(error).split())}") from error
    write_json(run.path / "slurm.json", {"job_id": job.job_id})
    return str(job.job_id)
