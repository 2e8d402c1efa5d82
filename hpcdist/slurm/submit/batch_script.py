"""The batch script of a run and its sbatch parameters. Pure functions of the config."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcdist.config.schema import ClusterConfig, Config
from hpcdist.config.written import secret_keys
from hpcdist.containers.rank_container import rank_container
from hpcdist.environments.rank_environment import python_of
from hpcdist.run.folder import RunDir
from hpcdist.run.work_tree import git_root
from hpcdist.slurm.extra_flags import option_value
from hpcdist.slurm.job.node_parents import obstacle_to_fork, planned_commands
from hpcdist.slurm.job.srun import step_command
from hpcdist.slurm.job_components import allocations, component_cluster
from hpcdist.supervisor.plan import rank_command

#: The shell of the batch step restarts a supervisor that is killed, by a user or for lack of memory, up to three times:
#: the allocation still exists, and the ranks continue from the newest checkpoint. It does not after Slurm's SIGTERM.
#: `|| code=$?` because set-up lines of the site may contain `set -e`.
_SUPERVISE = """\
trap 'left=0' TERM
supervise() {
  for left in 3 2 1 0; do
    code=0; %s "$@" || code=$?
    [ $code -gt 128 ] && [ $code -ne 143 ] && [ $left -gt 0 ] || return $code
    echo "the supervisor was killed (exit code $code): restarting it"
  done
}"""

#: Python with submitit that does not import NumPy.
_PYTHON = f"{shlex.quote(sys.executable)} -u -m hpcdist.slurm.job.submitit_entry"
#: The interpreter for submitit: the shell function above.
SUPERVISOR = "supervise"


def sbatch_parameters(config: Config, run: RunDir, flags: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the parameters of submitit's executor; `flags` are sbatch flags of one submission only."""
    first, *others = allocations(config)
    cluster = component_cluster(config.cluster, first)
    components = [line for part in others for line in component_lines(component_cluster(config.cluster, part))]
    optional = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "mem": cluster.mem,
        "constraint": cluster.constraint,
        "exclude": cluster.exclude,
        "gpus_per_node": cluster.gpus_per_node or None,
    }
    size, more = _size(cluster)
    flags_of_config = {
        name: shown for name, value in cluster.sbatch.items() if (shown := option_value(value)) is not None
    }
    return {
        **{key: value for key, value in optional.items() if value is not None},
        "job_name": f"{run.experiment}/{run.name}",
        "time": cluster.time_limit_min,
        **size,
        # submitit does not support heterogeneous jobs. Its set-up lines follow its parameters, and sbatch reads all
        # #SBATCH lines before the first command.
        "setup": [
            *components,
            *_exports(config),
            *cluster.setup,
            _SUPERVISE % _PYTHON,
        ],
        # The supervisor runs in the batch step and starts the ranks with srun itself.
        "use_srun": False,
        "stderr_to_stdout": True,
        # submitit sets a workload key by default, which clusters that check these keys reject.
        "wckey": None,
        "signal_delay_s": cluster.signal_lead_s,
        "additional_parameters": {
            "requeue": True,
            **more,
            **flags_of_config,
            **(flags or {}),
        },
    }


def _size(cluster: ClusterConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return nodes and cores of the first component as parameters of submitit, and as flags that it does not know."""
    most = cluster.nodes + cluster.spare_nodes
    cores = {"ntasks_per_node": cluster.tasks_per_node, "cpus_per_task": cluster.cpus_per_task}
    # The supervisor goes on without a failed node.
    more = {"no_kill": True} if cluster.outlives_nodes else {}
    least = cluster.fewest_nodes + cluster.spare_nodes
    if least == most:
        return {"nodes": most, **cores}, more
    # With --ntasks-per-node, Slurm gives the job at most one node for each task of its least number of nodes. submitit
    # computes with the number of nodes, so the range comes as a flag.
    mincpus = cluster.tasks_per_node * cluster.cpus_per_task
    return {"nodes": most}, {**more, "nodes": f"{least}-{most}", "mincpus": mincpus}


def _exports(config: Config) -> list[str]:
    """Return the job's variables; secrets come from the run folder instead, because Slurm shows batch scripts."""
    hidden = {path[2] for path in secret_keys(config) if path[:2] == ("cluster", "env")}
    return [
        f"# The supervisor sets {name} from secrets.json in the run folder"
        if name in hidden
        else f"export {name}={shlex.quote(value)}"
        for name, value in config.cluster.env.items()
    ]


def component_lines(cluster: ClusterConfig) -> list[str]:
    """Return the #SBATCH lines of a further component; job name, account, time limit and others are the first one's."""
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
    options = {name: "" if value is True else f"={shlex.quote(str(value))}" for name, value in flags.items() if value}
    return ["#SBATCH hetjob", *(f"#SBATCH --{name}{value}" for name, value in options.items())]


def render(config: Config, run: RunDir, flags: Mapping[str, str] | None = None, **array: Any) -> tuple[str, str]:
    """Return the batch script, and the commands that start the ranks of the first attempt; does not need Slurm.

    Args:
        array: submitit's `map_count` and `array_parallelism`, for a job array.
    """
    from submitit.slurm.slurm import _make_sbatch_string  # submitit has no public function for the text

    folder = run.path / "submitit"
    command = f"{SUPERVISOR} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    script = _make_sbatch_string(command=command, folder=folder, **sbatch_parameters(config, run, flags), **array)
    cwd = Path.cwd()
    box = rank_container(config, run, cwd=cwd, root=git_root(cwd) or cwd)
    python = box.python if box else python_of(config) or sys.executable
    rank = rank_command(run.path, python)
    lines = []
    if config.cluster.fork and (obstacle := obstacle_to_fork(config, box, {})):
        lines.append(f"cluster.fork has no effect: {obstacle}")
    elif config.cluster.fork:
        parents, rank = planned_commands(run, config, python)
        lines.append(shlex.join(parents))
    lines.append(shlex.join(step_command(config, run.attempt(1), rank, box)))
    return script, "\n".join(lines)


def commented(text: str) -> str:
    """Return text as comment lines of a shell script; the name of a folder may contain a newline."""
    return "\n".join(f"# {line}" for line in text.splitlines())
