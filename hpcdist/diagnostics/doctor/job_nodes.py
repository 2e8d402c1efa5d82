"""Preflight of the nodes of a running job, as a Slurm step beside the ranks."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcdist.config.schema import Config
from hpcdist.machine.check import Check, note, warning
from hpcdist.machine.timed_command import run_within
from hpcdist.preflight.node_checks import check_nodes
from hpcdist.preflight.probe import Request, probe_command, probe_env, read_answers
from hpcdist.rank.topology import port_for
from hpcdist.run.folder import RunDir

#: Limit for nodes to find each other, and for the whole step.
MEET_S = 20.0
STEP_TIMEOUT_S = 60.0
#: Slurm ends the step after this time even if srun was killed; minutes are its unit.
STEP_LIMIT_MIN = 2
#: Added to the attempt's number to get another port than the ranks'; no job has that many attempts.
_OTHER_PORT = 500


def check_job_nodes(run: RunDir, config: Config, job_id: str, nodes: Sequence[str]) -> list[Check]:
    """Run the preflight probe on each node in a step that overlaps the ranks' (`srun --overlap`).

    GPU memory in use is not reported, because the ranks use it.
    """
    gpus = config.cluster.gpus_per_node if config.launch.device != "cpu" else 0
    with _witness(run) as (witness, token):
        request = Request(
            nodes=tuple(nodes),
            port=port_for(job_id, run.read_state().attempt + _OTHER_PORT),
            token=token,
            run_folder=str(run.path),
            checkpoint_folder=str(run.checkpoints),
            witness=str(witness),
            tasks_per_node=config.cluster.tasks_per_node,
            gpus_per_node=gpus,
            backend="nccl" if gpus else "gloo",
            deadline_s=MEET_S,
        )
        # Inside another job, srun would take missing options from that job's variables.
        env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        if "SLURM_CONF" in os.environ:
            env["SLURM_CONF"] = os.environ["SLURM_CONF"]
        done = run_within(step_command(job_id, nodes, request), STEP_TIMEOUT_S, env={**env, **probe_env(request)})
    if done.returncode < 0:
        text = f"a step beside the ranks did not finish within {STEP_TIMEOUT_S:g} s"
        return [
            warning("nodes", text, f"`srun --jobid={job_id} --overlap hostname` shows the node that does not answer")
        ]
    answers = read_answers(done.stdout)
    if not answers:
        message = (done.stderr.strip().splitlines() or ["srun printed nothing"])[-1]
        return [warning("nodes", f"no node answered: {message[:200]}", f"`srun --jobid={job_id} --overlap hostname`")]
    checks = check_nodes(request, {node: _without_use(found) for node, found in answers.items()})
    if any(check.name in ("network", "disk") and check.level == "warning" for check in checks):
        checks.append(note("beside ranks", "the run was training during the measurement, so speeds are lower"))
    return checks


def _without_use(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's answer without the GPU memory in use."""
    return {**answer, "gpus": [{**gpu, "used_mb": None} for gpu in answer.get("gpus", ())]}


def step_command(job_id: str, nodes: Sequence[str], request: Request) -> list[str]:
    """Return the srun command with one task on each node of a job."""
    count = len(nodes)
    return [
        "srun",
        f"--jobid={job_id}",
        "--overlap",
        "--job-name=doctor",
        f"--time={STEP_LIMIT_MIN}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--mem=0",
        *([f"--gpus-per-node={request.gpus_per_node}"] if request.gpus_per_node else []),
        "--label",
        *probe_command(request),
    ]


@contextmanager
def _witness(run: RunDir) -> Iterator[tuple[Path, str]]:
    """Create the file in the run folder that all nodes must see; remove its folder afterwards."""
    token = secrets.token_hex(16)
    folder = run.path / f".doctor-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    try:
        witness = folder / "witness"
        witness.write_text(token)
        yield witness, token
    finally:
        shutil.rmtree(folder, ignore_errors=True)
