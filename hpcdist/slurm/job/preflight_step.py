"""The look at a job's nodes before its ranks: one step of srun, what it finds, and what follows from that.

Once in each life of a job with more than one node. What is looked at, and what is wrong, is `hpcdist.preflight`'s; this
module lets it run where the ranks will, in their containers if they have any, and acts on it.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpcdist.config.schema import Config, DataConfig
from hpcdist.containers.runtimes import outer_env
from hpcdist.containers.spec import ContainerSpec
from hpcdist.errors import HpcdistError, PreflightError
from hpcdist.files.atomic import write_atomic, write_json
from hpcdist.machine.check import Check
from hpcdist.machine.timed_command import last_line, run_within
from hpcdist.preflight.node_checks import check_nodes
from hpcdist.preflight.probe import Request, probe_command, probe_env, read_answers
from hpcdist.rank.topology import port_for
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir
from hpcdist.slurm.current_job import CurrentJob, signal_named_steps
from hpcdist.slurm.job.srun import PREFLIGHT_STEP, preflight_command
from hpcdist.slurm.job_components import allocations, components
from hpcdist.slurm.nodelist import expand

log = logging.getLogger(__name__)
#: For starting the step and its containers, and for what a probe looks at, beyond the time in which nodes wait for
#: each other.
STEP_S = {"quick": 60.0, "full": 180.0}
#: A node may be slow once, or its probe be hit by something that passes.
ROUNDS = 2


@dataclass(frozen=True)
class Look:
    """What a look at the nodes has brought: answers by node, and what was said where there is none."""

    answers: dict[str, dict[str, Any]]
    errors: str


class Preflight:
    """The preflight of one life of a job.

    Args:
        nodes: names of each component's nodes.
        env: what ranks inherit.
        het: whether the components are those of a heterogeneous job.
    """

    def __init__(
        self,
        run: RunDir,
        config: Config,
        job: CurrentJob,
        nodes: Sequence[Sequence[str]],
        *,
        env: Mapping[str, str],
        box: ContainerSpec | None,
        het: bool,
    ) -> None:
        self._run = run
        self._config = config
        self._job = job
        self._by_component = nodes
        self._nodes = [node for own in nodes for node in own]
        self._env = env if box is None else outer_env(box, env)
        self._box = box
        self._het = het
        self._done = config.preflight.mode == "off" or len(self._nodes) < 2
        #: Nodes that have failed and that the job can do without.
        self.avoid: list[str] = []
        #: Whether the nodes are not fit for a run.
        self.failed = False

    def look(self, attempt: Attempt) -> None:
        """Look at the nodes, once; leaves `preflight.json` and `preflight.txt` in the attempt's folder.

        Raises PreflightError where ranks should not be started on them.
        """
        if self._done:
            return
        self._done = True
        began = time.monotonic()
        request, look = self._ask(attempt)
        if attempt.request.exists():
            # Slurm ends probes with the rest of a job: they show nothing of their nodes. The ranks leave at once.
            log.info("preflight: cut short, since the run is asked to stop")
            return
        # Heterogeneous steps count tasks wrongly (22.05).
        tasks = [] if self._het else expand(self._env["SLURM_JOB_NODELIST"])
        checks = judged(request, look, tasks)
        seconds = time.monotonic() - began
        self._write(attempt, request, look, checks, seconds)
        for line in told(checks, seconds):
            log.info("%s", line)
        failures = [check for check in checks if check.level == "failure"]
        if failures:
            self.failed = True
            raise PreflightError(self._verdict(attempt, failures))

    def _request(self, attempt: Attempt, witness: Path, token: str) -> Request:
        config, parts = self._config, components(self._config)
        gpus = min(part.gpus_per_node for part in parts) if config.launch.device != "cpu" else 0
        backend = config.launch.backend
        port = int(self._env.get("HPCDIST_MASTER_PORT") or port_for(self._env["SLURM_JOB_ID"], attempt.number))
        return Request(
            mode="full" if config.preflight.mode == "full" else "quick",
            nodes=tuple(self._nodes),
            port=port,
            token=token,
            run_folder=str(self._run.path),
            checkpoint_folder=str(self._run.checkpoints),
            witness=str(witness),
            checkpoint_bytes=newest_checkpoint_bytes(self._run),
            # Where components differ, what the least of them has: nobody is blamed for what was not asked of it.
            gpus_per_node=gpus,
            tasks_per_node=min(part.tasks_per_node for part in parts),
            num_workers=loaders(config.data),
            backend=backend if backend != "auto" else "nccl" if gpus else "gloo",
        )

    # --- the step

    def _ask(self, attempt: Attempt) -> tuple[Request, Look]:
        """What was asked, and all nodes' answers; once more where some are missing."""
        for _ in range(ROUNDS):
            with _witness(attempt) as (witness, token):
                request = self._request(attempt, witness, token)
                look = self._one_step(request)
            if look.answers.keys() >= set(request.nodes) or attempt.request.exists():
                break
        return request, look

    def _one_step(self, request: Request) -> Look:
        parts = allocations(self._config)
        probe = probe_command(request, self._box.python if self._box is not None else sys.executable)
        nodes = self._by_component if self._het else [self._nodes]
        command = preflight_command(self._config, parts, nodes, probe, self._box, het=self._het)
        env = {**self._env, **probe_env(request)}
        done = run_within(command, request.deadline_s + STEP_S[request.mode], env=env)
        if done.returncode < 0:
            # Killing srun leaves probes that do not end by themselves.
            signal_named_steps(PREFLIGHT_STEP, "KILL")
        return Look(read_answers(done.stdout), done.stderr)

    # --- what follows

    def _verdict(self, attempt: Attempt, failures: Sequence[Check]) -> str:
        """Decide on `avoid`; returns one sentence: what is wrong where, and what to do, or why no node is left out."""
        more = f" (and {len(failures) - 1} more in {text_file(attempt)})" if len(failures) > 1 else ""
        sentence = f"preflight: {failures[0].sentence()}{more}"
        if self._config.preflight.on_failure == "stop":
            return sentence
        blamed = list(dict.fromkeys(check.node for check in failures))
        if "" in blamed or 2 * len(blamed) > len(self._nodes):
            return f"{sentence}; other nodes would be no better: none is excluded"
        if self._het:
            return f"{sentence}; a heterogeneous job cannot be queued again without {', '.join(blamed)}"
        try:
            replaceable = self._job.replaceable(blamed, idle_only=False)
        except HpcdistError as error:
            return f"{sentence}; Slurm does not say whether there are other nodes like {', '.join(blamed)} ({error})"
        if not replaceable:
            where = f"partition {self._job.partition}" if self._job.partition else "the partition"
            return f"{sentence}; {where} has no other node like {', '.join(blamed)} to go on with"
        self.avoid = blamed
        return sentence

    def _write(self, attempt: Attempt, request: Request, look: Look, checks: Sequence[Check], seconds: float) -> None:
        found = {
            "mode": request.mode,
            "seconds": round(seconds, 3),
            "nodes": list(request.nodes),
            "checks": [asdict(check) for check in checks],
            "answers": look.answers,
        }
        try:
            write_json(attempt.preflight, found)
            write_atomic(text_file(attempt), page(request.nodes, checks, seconds))
        except OSError as error:
            log.warning("the preflight's result cannot be written: %s", error)


def judged(request: Request, look: Look, tasks: Sequence[str]) -> list[Check]:
    """The check_nodes's findings; with what the tasks of silent nodes (`tasks` names each one's node) have said.

    Where nobody has answered the step itself has failed, which says nothing of the nodes: ranks may still start.
    """
    if not look.answers:
        return [
            Check(
                name="probe",
                level="warning",
                text=f"no node gave an answer in {ROUNDS} steps: {last_line(look.errors) or 'srun said nothing'}",
                fix="the ranks are started all the same",
            )
        ]
    checks = check_nodes(request, look.answers)
    silent = {node: task for task, node in enumerate(tasks) if node not in look.answers}
    return [
        replace(check, text=f"{check.text}: {said}")
        if check.node in silent and (said := last_line(_of_task(look.errors, silent[check.node])))
        else check
        for check in checks
    ]


def _of_task(text: str, task: int) -> str:
    return "\n".join(re.findall(rf"^\s*0*{task}: (.*)$", text, re.MULTILINE))


def told(checks: Sequence[Check], seconds: float) -> list[str]:
    """What the job's log has of it besides the failure that ends the run: the others, warnings, or that all is well."""
    failures = [check for check in checks if check.level == "failure"]
    bad = failures[1:] + [check for check in checks if check.level == "warning"]
    lines = [f"preflight: {check.level}: {check.sentence()}" for check in bad]
    well = [] if failures else [check.text for check in checks if check.level == "ok"][-1:]
    return lines + [f"preflight: {text} ({seconds:.1f} s with srun)" for text in well]


def page(nodes: Sequence[str], checks: Sequence[Check], seconds: float) -> str:
    """`preflight.txt`: everything that was found, the worst first as the check_nodes has it."""
    lines = [f"preflight of {len(nodes)} nodes ({', '.join(nodes)}), {seconds:.1f} s", ""]
    return "\n".join([*lines, *(f"{check.level:<8} {check.sentence()}" for check in checks), ""])


def text_file(attempt: Attempt) -> Path:
    return attempt.preflight.with_suffix(".txt")


def loaders(data: DataConfig) -> int:
    """Processes that load data for a rank: none where the whole set is held in memory, as all but files are."""
    from_files = data.preload == "never" or (data.preload == "auto" and data.name == "image_folder")
    return data.num_workers if from_files else 0


def newest_checkpoint_bytes(run: RunDir) -> int | None:
    """Size of the newest complete checkpoint, None where there is none."""
    complete = [path for path in run.checkpoints.glob("step-*") if (path / "manifest.json").exists()]
    if not complete:
        return None
    newest = max(complete, key=lambda path: (len(path.name), path.name))
    return sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())


@contextmanager
def _witness(attempt: Attempt) -> Iterator[tuple[Path, str]]:
    """A file that all nodes must see, in a folder of its own that goes with it, and the token in it."""
    folder, token = attempt.path / "preflight", secrets.token_hex(16)
    folder.mkdir(exist_ok=True)
    witness = folder / "witness"
    witness.write_text(token)
    try:
        yield witness, token
    finally:
        shutil.rmtree(folder, ignore_errors=True)
