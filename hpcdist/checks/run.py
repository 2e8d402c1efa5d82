"""Checks of a run and of the nodes of its job."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcdist.checks import containers
from hpcdist.checks.doctor import Section
from hpcdist.config.schema import Config
from hpcdist.config.topology import port_for
from hpcdist.host.commands import last_line
from hpcdist.host.files import fill, read_json
from hpcdist.host.machine import LEVELS, Check, note, ok, warning
from hpcdist.host.nodelist import expand
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.run.lease import holder
from hpcdist.run.slurm_job import job_of, job_starts
from hpcdist.run.status import RunStatus, status_of
from hpcdist.slurm import client
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.on_nodes import ask, task_words
from hpcdist.slurm.output import NodeState
from hpcdist.slurm.preflight.node_checks import check_nodes
from hpcdist.slurm.preflight.probe import ProbeRequest, probe_command, probe_env, witness_in

# Preflight of the nodes of a running job, as a Slurm step beside the ranks.

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
    with witness_in(run.path / f".doctor-{secrets.token_hex(4)}") as (witness, token):
        request = ProbeRequest(
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
        flags = {"jobid": job_id, "time": STEP_LIMIT_MIN, "mem": 0, "gpus-per-node": gpus or None}
        step = ["srun", *task_words(nodes, probe_command(request), "doctor", flags)]
        answers, _, errors, is_late = ask(step, nodes, STEP_TIMEOUT_S, env={**env, **probe_env(request)})
    look = f"`srun --jobid={job_id} --overlap hostname`"
    if is_late:
        text = f"a step beside the ranks did not finish within {STEP_TIMEOUT_S:g} s"
        return [warning("nodes", text, f"{look} shows the node that does not answer")]
    if not answers:
        message = last_line(errors) or "srun printed nothing"
        return [warning("nodes", f"no node answered: {message}", look)]
    checks = check_nodes(request, {node: _without_use(found) for node, found in answers.items()})
    if any(check.name in ("network", "disk") and check.level == "warning" for check in checks):
        checks.append(note("beside ranks", "the run was training during the measurement, so speeds are lower"))
    return checks


def _without_use(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's answer without the GPU memory in use."""
    return {**answer, "gpus": [{**gpu, "used_mb": None} for gpu in answer.get("gpus", ())]}


# `hpcdist doctor RUN`: sections about the run's status, failed attempts, and nodes.

#: Number of failed attempts and of healthy nodes with a line each.
SHOWN_ATTEMPTS = 5
SHOWN_NODES = 16
#: Node states of `sinfo` in which a node accepts no jobs.
_BAD = ("down", "drain", "fail", "error", "inval", "unknown", "not_responding", "reboot")
_STATUS_S = 30.0


def run_sections(run: RunDir, config: Config) -> list[Section]:
    """Return the sections about a run; for a run on Slurm also those about its nodes."""
    sections = [
        Section(title="Run", run=lambda: _status(run), timeout_s=_STATUS_S),
        Section(title="Attempts", run=lambda: attempts(run)),
        Section(title="Preflight", run=lambda: preflight(run)),
    ]
    if job_of(run) is None:
        return sections
    return [
        *sections,
        Section(title="Environment", run=lambda: containers.run_checks(run)),
        Section(title="Nodes in Slurm", run=lambda: _node_states(run), timeout_s=_STATUS_S),
        Section(title="Node preflight", run=lambda: _live(run, config), timeout_s=STEP_TIMEOUT_S + _STATUS_S),
    ]


# --- status


def _status(run: RunDir) -> list[Check]:
    now = status_of(run)
    checks = [status_check(run, now)]
    if now.slurm_error:
        text = f"Slurm cannot be reached: {now.slurm_error}"
        checks.append(warning("Slurm", text, "the node states below may be outdated; see `hpcdist doctor`"))
    started = (read_json(run.environment) or {}).get("host", "")
    if job_of(run) is None and started and started != socket.gethostname():
        text = f"the run was started on {started}; the sections below are about this machine, {socket.gethostname()}"
        checks.append(note("host", text, f"`hpcdist doctor {run.name}` on {started}"))
    if (held := holder(run)) is not None:
        ago = max(0, int(time.time() - float(held["renewed"])))
        text = f"process {held['pid']} of {held['user']} on {held['host']}, lease renewed {ago} s ago"
        checks.append(ok("held by", text))
    return checks


def status_check(run: RunDir, now: RunStatus) -> Check:
    """Return the run's status, with the next command if it failed or was lost."""
    text = now.sentence
    if now.facts is not None and not now.is_lost:
        text += f"; {now.facts.describe(time.time())}"
    if now.name == "lost":
        fix = f"`hpcdist resume {run.name}` continues it, `hpcdist sync {run.name}` closes it in MLflow"
        return warning("state", text, fix)
    if now.name == "failed":
        return warning("state", text, f"for the cause run `hpcdist explain {run.name}`")
    return ok("state", text)


# --- failed attempts


def attempts(run: RunDir) -> list[Check]:
    """Return the node of each failed attempt; add a warning if it is always the same node."""
    found = [(attempt, failure) for attempt in run.attempts() if (failure := read_json(attempt.failure)) is not None]
    if not found:
        started = len(run.attempts())
        return [ok("attempts", f"{started} started, none failed" if started else "none started yet")]
    checks = [_failed(attempt, failure) for attempt, failure in found[-SHOWN_ATTEMPTS:]]
    if len(found) > SHOWN_ATTEMPTS:
        checks.insert(0, note("attempts", f"{len(found) - SHOWN_ATTEMPTS} earlier ones failed as well"))
    by_host = Counter(str(failure.get("host", "")) for _, failure in found)
    host, times = by_host.most_common(1)[0]
    if host and times > 1 and len(by_host) == 1 and job_of(run) is not None:
        text = f"all {times} failures happened on this node"
        fix = f"`hpcdist resume {run.name} cluster.exclude={host.partition('.')[0]}`, and report the node"
        checks.append(warning("suspect", text, fix, node=host))
    return checks


def _failed(attempt: Attempt, failure: dict[str, Any]) -> Check:
    step = f" after step {failure['step']}" if failure.get("step") else ""
    error = " ".join(str(failure.get("error", "")).split())
    return note(
        f"attempt {attempt.number}",
        f"rank {failure.get('rank')} failed{step}: {error[:200]}",
        node=str(failure.get("host", "")),
    )


@dataclass(frozen=True, kw_only=True)
class _Preflight:
    """The part of `preflight.json` that the report shows."""

    nodes: list[str] = field(default_factory=list)
    checks: list[Any] = field(default_factory=list)


def preflight(run: RunDir) -> list[Check]:
    """Return the results of the newest preflight."""
    checked = [attempt for attempt in run.attempts() if attempt.preflight.is_file()]
    if not checked:
        return []
    newest = checked[-1]
    saved = fill(_Preflight, read_json(newest.preflight) or {}, newest.preflight)
    ago = max(0, int(time.time() - newest.preflight.stat().st_mtime)) // 60
    when = f"before attempt {newest.number}, {ago} min ago, on {len(saved.nodes)} nodes"
    checks = [fill(Check, check, newest.preflight) for check in saved.checks if isinstance(check, dict)]
    bad = [check for check in checks if LEVELS.index(check.level) >= LEVELS.index("warning")]
    head = f"{len(bad)} finding{'s' * (len(bad) != 1)}" if bad else "no problems"
    return [Check(name="result", level="note" if bad else "ok", text=f"{head} {when}"), *bad]


# --- nodes


def nodes_of(run: RunDir, now: RunStatus) -> list[str]:
    """Return the nodes of the run's job, those of the current start first, then those before each requeue."""
    present = expand(now.facts.nodes) if now.facts is not None and now.facts.nodes else []
    earlier = [node for start in reversed(job_starts(run)) for node in expand(str(start.get("nodes", "")))]
    return list(dict.fromkeys([*present, *earlier]))


def _node_states(run: RunDir) -> list[Check]:
    nodes = nodes_of(run, status_of(run))
    if not nodes:
        return []
    try:
        states = client.node_states(names=nodes)
    except SlurmError as error:
        return [warning("nodes", f"Slurm does not report their states: {error}", "see `hpcdist doctor`")]
    return node_checks(states, nodes)


def node_checks(states: Sequence[NodeState], nodes: Sequence[str]) -> list[Check]:
    """Return a check for each of `nodes`, those that Slurm starts no jobs on first."""
    known = {state.name: state for state in states}
    bad, healthy = [], []
    for node in nodes:
        found = known.get(node)
        if found is None:
            bad.append(warning(node, "Slurm has no node of this name any more", node=node))
            continue
        if found.state.lower().startswith(_BAD) or "*" in found.state:
            bad.append(_unfit(found))
        else:
            healthy.append((node, found.state))
    shown = [ok(node, state, node=node) for node, state in healthy[:SHOWN_NODES]]
    if len(healthy) > SHOWN_NODES:
        counts = Counter(state for _, state in healthy[SHOWN_NODES:])
        shown.append(ok("others", ", ".join(f"{count} {state}" for state, count in counts.items())))
    return bad + shown


def _unfit(node: NodeState) -> Check:
    parts = [node.state + (" (does not answer)" if "*" in node.state else "")]
    if node.since is not None:
        parts.append(f"since {time.strftime('%Y-%m-%d %H:%M', time.localtime(node.since))}")
    if node.reason:
        parts.append(f"{node.reason!r}" + (f" by {node.user}" if node.user else ""))
    fix = "Slurm starts no jobs there; `hpcdist resume` gets other nodes. "
    fix += f"After the repair an administrator runs `scontrol update nodename={node.name} state=resume`"
    return warning(node.name, ", ".join(parts), fix, node=node.name)


def _live(run: RunDir, config: Config) -> list[Check]:
    """Run the preflight on the nodes while the run's job has them."""
    now = status_of(run)
    job = job_of(run)
    if now.facts is None or job is None or now.facts.state != "RUNNING" or shutil.which("srun") is None:
        return [ok("nodes", "not run: the run has no nodes at present")]
    if config.cluster.roles and len(now.facts.nodes.split(",")) > 1 and config.cluster.het is not False:
        return [note("nodes", "not available while a heterogeneous job runs; see the section Preflight")]
    return check_job_nodes(run, config, job.id, expand(now.facts.nodes))
