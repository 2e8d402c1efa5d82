"""The preflight check of a job's nodes, as one srun step before the ranks, and its consequences.

It runs at each start of a job with more than one node, in the ranks' containers if there are any. `hpcdist.checks` asks
the nodes and judges their answers.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace

from hpcdist.checks.node_probe import ProbeRequest, probe_command, witness_in
from hpcdist.checks.preflight import Needs, check_nodes
from hpcdist.config.schema import Config
from hpcdist.containers.probe import PROBE_TIMEOUT_S
from hpcdist.containers.runtimes import outer_env
from hpcdist.containers.spec import ContainerSpec
from hpcdist.errors import HpcdistError, PreflightError
from hpcdist.host.check_result import Check, warning
from hpcdist.host.files import write_atomic
from hpcdist.host.json_files import write_json
from hpcdist.host.time_limits import last_line
from hpcdist.job.srun import PREFLIGHT_STEP, preflight_command
from hpcdist.run.checkpoint_files import complete_checkpoints
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.slurm.client import CurrentJob, signal_named_steps
from hpcdist.slurm.on_nodes import Answers, JobNodes, ask, lines_of_task
from hpcdist.slurm.placement import role_nodes

log = logging.getLogger(__name__)
#: Time limit for the start of the step and its containers, the import of torch and the checks, in addition to the time
#: in which the nodes join a group.
STEP_S = 120.0
#: A step without an answer of every node is repeated once.
ROUNDS = 2


@dataclass(eq=False)
class Preflight:
    """The preflight check of one start of a job."""

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
        self._done = self.config.preflight.mode == "off" or len(self.nodes.names) <= 1
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
        needs = self._needs()
        answers, asked_at = self._ask(attempt, needs)
        if attempt.request.exists():
            # Slurm ends the probes with the job, so missing answers mean nothing. The ranks will stop at once.
            log.info("preflight: skipped, because the run is stopping")
            return
        tasks = list(self.nodes.names)
        checks = _find_problems(needs, answers, tasks, asked_at)
        seconds = time.monotonic() - began
        self._write(attempt, answers, checks, seconds)
        failures = [check for check in checks if check.level == "failure"]
        warnings = [check for check in checks if check.level == "warning"]
        # The first failure is in the message of the error.
        for check in failures[1:] + warnings:
            log.info("preflight: %s: %s", check.level, check.sentence())
        if failures:
            self.failed = True
            raise PreflightError(self._verdict(attempt, failures))
        passed = [check for check in checks if check.level == "ok"]
        if passed:
            log.info("preflight: %s (%.1f s with srun)", passed[-1].text, seconds)

    def _needs(self) -> Needs:
        """Return the needs of the run on each node."""
        config = self.config
        gpus = 0
        if config.launch.device != "cpu":
            # If roles differ, the minimum: no node fails for hardware that its ranks do not need.
            gpus = min(part.gpus_per_node for part in role_nodes(config))
        return Needs(
            nodes=tuple(self.nodes.names),
            run_folder=str(self.folder.path),
            checkpoint_bytes=newest_checkpoint_bytes(self.folder),
            gpus_per_node=gpus,
            gpu_type=config.launch.gpu_type,
            backend=config.launch.backend_on(gpus=gpus > 0),
            join_s=config.launch.init_timeout_s + self._unpack_s,
        )

    @property
    def _unpack_s(self) -> float:
        """Time in which pyxis unpacks the image on each node before the step starts.

        Killing the step earlier does not end the unpacking: Slurm would drain the node (`UnkillableStepTimeout`).
        """
        if self.box is None or self.box.runtime != "pyxis":
            return 0.0
        return PROBE_TIMEOUT_S

    def _ask(self, attempt: Attempt, needs: Needs) -> tuple[Answers, float]:
        """Return the nodes' answers and the time of the question; repeats the step if answers are missing."""
        env = {**self.env, "HPCDIST_ATTEMPT": str(attempt.number)}
        for _ in range(ROUNDS):
            with witness_in(attempt.path / "preflight") as (witness, token):
                request = ProbeRequest(
                    first_node=needs.nodes[0],
                    run_folder=needs.run_folder,
                    checkpoint_folder=str(self.folder.checkpoints),
                    witness=str(witness),
                    token=token,
                    attempt=attempt.number,
                    join_s=needs.join_s,
                )
                probe = probe_command(request, self.python)
                command = preflight_command(self.config, self.nodes, probe, self.box)
                asked_at = time.time()
                answers = ask(command, needs.nodes, needs.join_s + STEP_S, env=env)
                if answers.was_killed:
                    # Killing srun does not end its tasks.
                    signal_named_steps(PREFLIGHT_STEP, "KILL")
            has_all_answers = answers.by_node.keys() >= set(needs.nodes)
            if has_all_answers or attempt.request.exists():
                break
        return answers, asked_at

    def _verdict(self, attempt: Attempt, failures: Sequence[Check]) -> str:
        """Set `blamed` and `avoid`; returns the first failure, with the reason if its node cannot be excluded."""
        sentence = f"preflight: {failures[0].sentence()}"
        if len(failures) > 1:
            sentence += f" (and {len(failures) - 1} more in {attempt.preflight_text})"
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

    def _write(self, attempt: Attempt, answers: Answers, checks: Sequence[Check], seconds: float) -> None:
        """Write the results to the attempt's folder, as JSON and as text."""
        nodes = self.nodes.names
        report = {
            "seconds": round(seconds, 3),
            "nodes": nodes,
            "checks": [asdict(check) for check in checks],
            "answers": answers.by_node,
        }
        lines = [f"preflight of {len(nodes)} nodes ({', '.join(nodes)}), {seconds:.1f} s", ""]
        lines += [f"{check.level:<8} {check.sentence()}" for check in checks]
        try:
            write_json(attempt.preflight, report)
            write_atomic(attempt.preflight_text, "\n".join([*lines, ""]))
        except OSError as error:
            log.warning("cannot write the result of the preflight check: %s", error)


def _find_problems(needs: Needs, answers: Answers, tasks: Sequence[str], asked_at: float) -> list[Check]:
    """Return the checks of the answers, with srun's errors about the nodes that did not answer.

    Args:
        tasks: the node of each task of the step.
        asked_at: time of the question, in seconds since the epoch.
    """
    if not answers.by_node:
        # The step itself failed, which does not show a problem of the nodes: ranks may still start.
        why = last_line(answers.errors) or "no output of srun"
        return [warning("probe", f"no node answered in {ROUNDS} steps: {why}", "the ranks start nevertheless")]
    checks = check_nodes(needs, answers.by_node, asked_at, time.time())
    # The probe of a node may have ended before its answer, or before it had seen the group.
    ended = {node: task for task, node in enumerate(tasks) if "group" not in answers.by_node.get(node, {})}
    with_errors = []
    for check in checks:
        message = ""
        if check.name in ("answer", "group") and check.node in ended:
            message = last_line(lines_of_task(answers.errors, ended[check.node]))
        if message:
            with_errors.append(replace(check, text=f"{check.text}: {message}"))
        else:
            with_errors.append(check)
    return with_errors


def newest_checkpoint_bytes(run: RunDir) -> int | None:
    """Return the size of the newest complete checkpoint; None if there is none."""
    checkpoints = complete_checkpoints(run)
    if not checkpoints:
        return None
    _, folder = checkpoints[-1]
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
