"""What sbatch is asked for, and the text of the batch script: pure functions of the config."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcdist.config.schema import ClusterConfig, Config
from hpcdist.config.written import secret_keys
from hpcdist.containers.request import box_for
from hpcdist.run.folder import RunDir
from hpcdist.run.snapshot import git_root
from hpcdist.slurm.extra_flags import option_value
from hpcdist.slurm.job.srun import step_command
from hpcdist.slurm.job_components import allocations, cluster_for
from hpcdist.supervisor.plan import rank_command

#: The shell of the batch step outlives a supervisor that is killed, by someone or for want of memory, and starts it
#: again: the allocation is there, and the ranks go on from the newest checkpoint. Not after Slurm has told the job to
#: end. `|| code=$?` since lines of the site's own may have said `set -e`.
_SUPERVISE = """\
trap 'left=0' TERM
supervise() {
  for left in 3 2 1 0; do
    code=0; %s "$@" || code=$?
    [ $code -gt 128 ] && [ $code -ne 143 ] && [ $left -gt 0 ] || return $code
    echo "the supervisor was killed (exit code $code) and is started again"
  done
}"""

#: Python, in which submitit imports no NumPy.
_PYTHON = f"{shlex.quote(sys.executable)} -u -m hpcdist.slurm.job.submitit_entry"
#: What submitit takes for the interpreter.
SUPERVISOR = "supervise"


def sbatch_parameters(config: Config, run: RunDir, flags: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What submitit's executor is told, by sbatch's names; `flags` are those of one submission alone."""
    first, *others = allocations(config)
    cluster = cluster_for(config.cluster, first)
    components = [line for part in others for line in component_lines(cluster_for(config.cluster, part))]
    optional = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "mem": cluster.mem,
        "constraint": cluster.constraint,
        "exclude": cluster.exclude,
        "gpus_per_node": cluster.gpus_per_node or None,
    }
    further = {name: shown for name, value in cluster.sbatch.items() if (shown := option_value(value)) is not None}
    return {
        **{key: value for key, value in optional.items() if value is not None},
        "job_name": f"{run.experiment}/{run.name}",
        "time": cluster.time_limit_min,
        "nodes": cluster.nodes,
        "ntasks_per_node": cluster.tasks_per_node,
        "cpus_per_task": cluster.cpus_per_task,
        # submitit knows no heterogeneous jobs. Its set-up lines follow its parameters, and to sbatch a comment that
        # stands before the first command is as good as those.
        "setup": [
            *components,
            *_exports(config),
            *cluster.setup,
            _SUPERVISE % _PYTHON,
        ],
        # The supervisor runs once, in the batch step, and starts the ranks with an srun of its own.
        "use_srun": False,
        "stderr_to_stdout": True,
        # submitit's default is a workload key, which clusters that check them refuse.
        "wckey": None,
        "signal_delay_s": cluster.signal_lead_s,
        "additional_parameters": {"requeue": True, **further, **(flags or {})},
    }


def _exports(config: Config) -> list[str]:
    """The job's variables. Slurm keeps the script and shows it, so secrets come from the run folder (`secret_file`)."""
    hidden = {path[2] for path in secret_keys(config) if path[:2] == ("cluster", "env")}
    return [
        f"# {name} is set by the supervisor, which reads it from secrets.json in the run folder"
        if name in hidden
        else f"export {name}={shlex.quote(value)}"
        for name, value in config.cluster.env.items()
    ]


def component_lines(cluster: ClusterConfig) -> list[str]:
    """What sbatch reads of a further component; job name, account, time limit and the like are the first one's."""
    flags = {
        "partition": cluster.partition,
        "constraint": cluster.constraint,
        "mem": cluster.mem,
        "exclude": cluster.exclude,
        "nodes": cluster.nodes,
        "ntasks-per-node": cluster.tasks_per_node,
        "gpus-per-node": cluster.gpus_per_node or None,
        "cpus-per-task": cluster.cpus_per_task,
        **{name: option_value(value) for name, value in cluster.sbatch.items()},
    }
    told = {name: "" if value is True else f"={shlex.quote(str(value))}" for name, value in flags.items() if value}
    return ["#SBATCH hetjob", *(f"#SBATCH --{name}{value}" for name, value in told.items())]


def render(config: Config, run: RunDir, flags: Mapping[str, str] | None = None, **array: Any) -> tuple[str, str]:
    """The whole batch script and the first attempt's srun line, also where no Slurm is installed.

    Args:
        array: submitit's `map_count` and `array_parallelism`, for a job array.
    """
    from submitit.slurm.slurm import _make_sbatch_string  # the only way to its text without a submission

    folder = run.path / "submitit"
    command = f"{SUPERVISOR} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    script = _make_sbatch_string(command=command, folder=folder, **sbatch_parameters(config, run, flags), **array)
    cwd = Path.cwd()
    box = box_for(config, run, cwd=cwd, root=git_root(cwd) or cwd)
    rank = rank_command(run.path, box.python) if box else rank_command(run.path)
    return script, shlex.join(step_command(config, run.attempt(1), rank, box))
