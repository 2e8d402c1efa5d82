"""The preflight check of a job's nodes, as one srun step before the ranks, and its consequences.

It runs at each start of a job with more than one node, in the ranks' containers if there are any.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path

from hpcdist.config.launch_schema import NVIDIA
from hpcdist.config.schema import Config
from hpcdist.config.topology import expand, port_for
from hpcdist.containers.spec import ContainerSpec, outer_env
from hpcdist.containers.steps import PROBE_TIMEOUT_S
from hpcdist.errors import HpcdistError, PreflightError
from hpcdist.host.commands import last_line
from hpcdist.host.files import write_atomic, write_json
from hpcdist.host.machine import Check, warning
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.run.records import complete_checkpoints
from hpcdist.slurm.client import CurrentJob, signal_named_steps
from hpcdist.slurm.job.srun import PREFLIGHT_STEP, preflight_command
from hpcdist.slurm.on_nodes import Answers, JobNodes, ask, lines_of_task
from hpcdist.slurm.placement import role_nodes
from hpcdist.slurm.preflight_checks import check_nodes
from hpcdist.slurm.preflight_probe import ProbeRequest, probe_command, probe_env, witness_in

log = logging.getLogger(__name__)
#: Time limit for the start of the step and its containers and for the checks, in addition to the time in which nodes
#: wait for each other.
STEP_S = 60.0
#: A step without an answer of every node is repeated once.
ROUNDS = 2


@dataclass(eq=False)
class Preflight:
    folder: RunDir
    config: Config
    job: CurrentJob
    nodes: JobNodes
    _: KW_ONLY
    env: Mapping[str, str]
    python: str
    box: ContainerSpec | None

    def __post_init__(self) -> None:
        if self.box is not None:
            self.env = outer_env(self.box, self.env)
        self._done = self.config.preflight.mode == "off" or len(self.nodes.names) < 2
        #: Nodes that failed and that other nodes can replace.
        self.avoid: list[str] = []
        #: Nodes that failed, unless the check concerns most nodes or `preflight.on_failure` is `stop`.
        self.blamed: list[str] = []
        #: Whether the check failed.
        self.failed = False

    def run(self, attempt: Attempt) -> None:
        """Check the nodes, at the first call only. Raises PreflightError if ranks should not be started on them."""
        if self._done:
            return
        self._done = True
        began = time.monotonic()
        request, found = self._ask(attempt)
        if attempt.request.exists():
            # Slurm ends the probes with the job, so missing answers mean nothing. The ranks will stop at once.
            log.info("preflight: skipped, because the run is stopping")
            return
        tasks = expand(self.env["SLURM_JOB_NODELIST"])
        checks = _find_problems(request, found, tasks)
        seconds = time.monotonic() - began
        self._write(attempt, request, found, checks, seconds)
        failures = [check for check in checks if check.level == "failure"]
        # The first failure ends the run.
        for check in failures[1:] + [check for check in checks if check.level == "warning"]:
            log.info("preflight: %s: %s", check.level, check.sentence())
        if failures:
            self.failed = True
            raise PreflightError(self._verdict(attempt, failures))
        for check in [check for check in checks if check.level == "ok"][-1:]:
            log.info("preflight: %s (%.1f s with srun)", check.text, seconds)

    def _request(self, attempt: Attempt, witness: Path, token: str) -> ProbeRequest:
        config, parts = self.config, role_nodes(self.config)
        gpus = min(part.gpus_per_node for part in parts) if config.launch.device != "cpu" else 0
        # pyxis unpacks the image on each node before the step starts. Killing the step earlier does not end the
        # unpacking: Slurm would drain the node (`UnkillableStepTimeout`).
        unpack_s = PROBE_TIMEOUT_S if self.box is not None and self.box.runtime == "pyxis" else 0.0
        port = int(self.env.get("HPCDIST_MASTER_PORT") or port_for(self.env["SLURM_JOB_ID"], attempt.number))
        return ProbeRequest(
            nodes=tuple(self.nodes.names),
            port=port,
            token=token,
            run_folder=str(self.folder.path),
            checkpoint_folder=str(self.folder.checkpoints),
            witness=str(witness),
            checkpoint_bytes=newest_checkpoint_bytes(self.folder),
            # If roles differ, the minimum: no node fails for hardware that its ranks do not need. The nodes count by
            # NVIDIA's driver.
            gpus_per_node=gpus if config.launch.gpu_type == NVIDIA else 0,
            backend=config.launch.backend_on(gpus=gpus > 0),
            deadline_s=ProbeRequest.deadline_s + unpack_s,
        )

    def _ask(self, attempt: Attempt) -> tuple[ProbeRequest, Answers]:
        """Return the request and the nodes' answers; repeats the step if answers are missing."""
        for _ in range(ROUNDS):
            with witness_in(attempt.path / "preflight") as (witness, token):
                request = self._request(attempt, witness, token)
                command = preflight_command(self.config, self.nodes, probe_command(request, self.python), self.box)
                limit_s = request.deadline_s + STEP_S
                found = ask(command, request.nodes, limit_s, env={**self.env, **probe_env(request)})
                if found.was_killed:
                    # Killing srun does not end its tasks.
                    signal_named_steps(PREFLIGHT_STEP, "KILL")
            if found.by_node.keys() >= set(request.nodes) or attempt.request.exists():
                break
        return request, found

    def _verdict(self, attempt: Attempt, failures: Sequence[Check]) -> str:
        """Set `avoid`; returns the first failure, with the reason if its node cannot be excluded."""
        more = f" (and {len(failures) - 1} more in {attempt.preflight_text})" if len(failures) > 1 else ""
        sentence = f"preflight: {failures[0].sentence()}{more}"
        if self.config.preflight.on_failure == "stop":
            return sentence
        blamed = list(dict.fromkeys(check.node for check in failures))
        if "" in blamed or 2 * len(blamed) > len(self.nodes.names):
            return f"{sentence}; it concerns no single node, or most of them: none is excluded"
        self.blamed = blamed
        try:
            replaceable = self.job.replaceable(blamed, idle_only=False)
        except HpcdistError as error:
            return f"{sentence}; cannot find nodes to replace {', '.join(blamed)} ({error})"
        if not replaceable:
            partition = f"partition {self.job.partition}" if self.job.partition else "the partition"
            return f"{sentence}; {partition} has no node to replace {', '.join(blamed)}"
        self.avoid = blamed
        return sentence

    def _write(
        self, attempt: Attempt, request: ProbeRequest, found: Answers, checks: Sequence[Check], seconds: float
    ) -> None:
        report = {
            "seconds": round(seconds, 3),
            "nodes": list(request.nodes),
            "checks": [asdict(check) for check in checks],
            "answers": found.by_node,
        }
        lines = [f"preflight of {len(request.nodes)} nodes ({', '.join(request.nodes)}), {seconds:.1f} s", ""]
        lines += [f"{check.level:<8} {check.sentence()}" for check in checks]
        try:
            write_json(attempt.preflight, report)
            write_atomic(attempt.preflight_text, "\n".join([*lines, ""]))
        except OSError as error:
            log.warning("cannot write the result of the preflight check: %s", error)


def _find_problems(request: ProbeRequest, found: Answers, tasks: Sequence[str]) -> list[Check]:
    """Return the checks of the answers, with the errors of nodes that did not; `tasks` has the node of each task."""
    if not found.by_node:
        # The step itself failed, which does not show a problem of the nodes: ranks may still start.
        why = last_line(found.errors) or "no output of srun"
        return [warning("probe", f"no node answered in {ROUNDS} steps: {why}", "the ranks start nevertheless")]
    checks = check_nodes(request, found.by_node)
    silent = {node: task for task, node in enumerate(tasks) if node not in found.by_node}
    return [
        replace(check, text=f"{check.text}: {message}")
        if check.node in silent and (message := last_line(lines_of_task(found.errors, silent[check.node])))
        else check
        for check in checks
    ]


def newest_checkpoint_bytes(run: RunDir) -> int | None:
    complete = complete_checkpoints(run)
    return sum(path.stat().st_size for path in complete[-1][1].rglob("*") if path.is_file()) if complete else None
