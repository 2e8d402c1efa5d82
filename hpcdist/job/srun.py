"""Command lines of srun for all steps of a job, and srun's messages about their tasks. Pure functions."""

import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcdist.config.cluster_schema import ClusterConfig
from hpcdist.config.schema import Config
from hpcdist.config.slurm_notation import expand
from hpcdist.config.written import secret_keys
from hpcdist.containers.runtimes import CONTAINERS_STEP, IGNORE_USR2, container_words
from hpcdist.containers.spec import ContainerSpec
from hpcdist.errors import UserMistake
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.slurm.on_nodes import NODES_STEP, JobNodes, srun_words, task_words
from hpcdist.slurm.placement import requested_cluster, role_nodes
from hpcdist.supervisor.plan import parent_command, processor_env, rank_command

PREFLIGHT_STEP = "preflight"
WATCHDOG_STEP = "job-watchdog"
#: The module of the watchdog and of the search for ranks.
NODE_STEPS = "hpcdist.job.node_steps"
#: Beginnings of the names of steps that end before the next attempt; the watchdog ends with the supervisor.
STEP_NAMES = ("ranks-", PREFLIGHT_STEP, NODES_STEP, CONTAINERS_STEP)


def task_command(run: RunDir, config: Config, python: str) -> list[str]:
    """Return the command of a task, the parent of one rank."""
    fork = config.launch.fork and not config.trainer.script
    rank = rank_command(run.path, python)
    return parent_command(run.path, "task", rank, fork=fork, limit_s=config.launch.init_timeout_s)


def step_command(
    config: Config,
    attempt: Attempt,
    command: Sequence[str],
    box: ContainerSpec | None = None,
    chosen: Sequence[str] = (),
    *,
    overlap: bool = False,
) -> list[str]:
    """Return the step that runs the parents of all ranks, on the `chosen` nodes if the allocation may have more.

    srun passes requests and reports between the supervisor and the parents on. Raises UserMistake if Slurm cannot write
    to the attempt's folder.

    Args:
        attempt: the first attempt of the parents.
        command: of each task.
        overlap: the step may share processors with an earlier one that Slurm cannot end.
    """
    problem = unusable_path(attempt.path)
    if problem:
        raise UserMistake(problem)
    parts = role_nodes(config)
    flags = _flags(requested_cluster(config), attempt)
    if len(parts) == 1:
        flags |= {"nodelist": ",".join(chosen) or None, "overlap": overlap or None}
    else:
        # The file that SLURM_HOSTFILE names has the node of each rank.
        num_ranks = sum(part.num_ranks for part in parts)
        flags |= {"nodes": None, "ntasks-per-node": None, "ntasks": num_ranks, "distribution": "arbitrary"}
    return ["srun", *srun_words(flags), *_rank_words(command, box)]


def _rank_words(command: Sequence[str], box: ContainerSpec | None) -> list[str]:
    """Return the words of a task's command, in its container if there is one."""
    if box is None:
        return [*IGNORE_USR2, *command]
    return container_words(box, command)


def _flags(cluster: ClusterConfig, attempt: Attempt) -> dict[str, Any]:
    """Return the options of the step of ranks; those of the config take precedence."""
    return {
        "job-name": step_name(attempt),
        "nodes": cluster.nodes,
        "ntasks": cluster.nodes * cluster.tasks_per_node,
        "ntasks-per-node": cluster.tasks_per_node,
        "cpus-per-task": cluster.cpus_per_task,  # srun does not inherit it from sbatch since Slurm 22.05
        "gpus-per-node": cluster.gpu_request,
        # Without one of them, the supervisor ends the others.
        "kill-on-bad-exit": 0,
        "wait": 0,
        "open-mode": "append",
        # One file per task, its number padded as in Attempt.log: errors before the parent can start a rank.
        "error": f"{attempt.path}/rank-%5t.log",
        **{name: option_value(value) for name, value in cluster.srun.items()},
    }


def unusable_path(path: Path) -> str:
    """Return why Slurm cannot write output below a path; "" if it can.

    sbatch, srun and submitit replace `%` in the names of output files. `%%` is no escape: Slurm 22.05 makes `%14` of
    `%%j`, and a backslash turns all replacements off, also that of the task's number.
    """
    if "%" not in str(path):
        return ""
    return f"{path}: Slurm replaces % in the names of output files: choose a runs_dir without it"


def step_name(attempt: Attempt) -> str:
    """Return the name of the step with the parents that start the ranks of this attempt, and perhaps of later ones."""
    return f"ranks-{attempt.number:03d}"


def rank_env(config: Config) -> dict[str, str]:
    """Return the variables of ranks in addition to the job's. Ranks find their network interfaces themselves."""
    cluster = requested_cluster(config)
    threads = config.launch.num_threads or cluster.cpus_per_task
    use_gpus = cluster.gpus_per_node > 0 and config.launch.device != "cpu"
    env = {
        name: value
        for name, value in processor_env(threads, use_gpus=use_gpus).items()
        if not name.endswith("_SOCKET_IFNAME")
    }
    return {**env, **config.cluster.env, **config.launch.env}


def watchdog_command(job_id: str, node: str) -> list[str]:
    """Return the step that runs the watchdog of a job on a node."""
    command = [sys.executable, "-P", "-m", NODE_STEPS, "watch", job_id]
    return ["srun", *task_words([node], command, WATCHDOG_STEP, {"nodelist": node})]


def preflight_command(
    config: Config, nodes: JobNodes, command: Sequence[str], box: ContainerSpec | None = None
) -> list[str]:
    """Return a step that runs a command once on each node, with the cores, GPUs and container of its ranks."""
    cluster = requested_cluster(config)
    flags = {
        "label": True,
        "cpus-per-task": cluster.tasks_per_node * cluster.cpus_per_task,
        "gpus-per-node": cluster.gpu_request,
        **{name: option_value(value) for name, value in cluster.srun.items()},
    }
    return ["srun", *task_words(nodes.names, _rank_words(command, box), PREFLIGHT_STEP, flags)]


def option_value(value: str) -> str | bool | None:
    """Return the value of an option: True (no value) for `true`, None (leave the option out) for `false`."""
    return {"true": True, "false": None}.get(value.lower(), value)


def exposed_secrets(config: Config) -> list[str]:
    """Return a problem for each secret that would be part of the batch script or of a command line."""
    problems = []
    for path in secret_keys(config):
        if path[0] in ("cluster", "container") and path[1] != "env":
            problems.append(
                f"{'.'.join(path)} holds a secret, which other users could read in the batch script or on a command"
                " line: pass it as an environment variable, such as cluster.env.MY_TOKEN='${oc.env:MY_TOKEN}'"
            )
    return problems


# The messages of srun.

#: `srun: error: n2: tasks 2-3: Killed`, `srun: error: n1: task 0: Exited with exit code 1`
_TASK_ENDED = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<ranks>[\d,\-]+): (?P<how>.+)")
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_SIGNALS = {str(signal.strsignal(number)): number for number in signal.Signals} | {"Out Of Memory": signal.SIGKILL}


def ended_tasks(messages: str) -> dict[int, tuple[str, int]]:
    """Return host and exit code (negative: signal) of each task that srun reports as failed, in its order."""
    ended: dict[int, tuple[str, int]] = {}
    for match in _TASK_ENDED.finditer(messages):
        code = _exit_code(match["how"].strip())
        for task in expand(f"t[{match['ranks']}]"):
            ended.setdefault(int(task[1:]), (match["host"], code))
    return ended


def _exit_code(how: str) -> int:
    """Return the exit code of a task by srun's text about its end, such as `Killed`; 1 for an unknown text."""
    match = _EXIT_CODE.match(how)
    if match:
        return int(match[1])
    for name, number in _SIGNALS.items():
        if how.startswith(name):
            return -number
    return 1
