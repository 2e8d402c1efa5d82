"""`hpcdist doctor RUN`: how the run stands, what has failed where, and how its nodes are now."""

from __future__ import annotations

import shutil
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcdist.config.schema import Config
from hpcdist.diagnostics.doctor.live_nodes import LOOK_S, look_at_nodes
from hpcdist.diagnostics.doctor.section import Section
from hpcdist.files.formats import fill
from hpcdist.machine.check import LEVELS, Check
from hpcdist.run.folder import Attempt, RunDir, read_json
from hpcdist.run.lease import holder
from hpcdist.run.status import Standing, job_lives, job_of, look_now, stand
from hpcdist.slurm import client
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.cluster_nodes import NodeState
from hpcdist.slurm.nodelist import expand

#: Attempts that have a line each; nodes of a run that have one where nothing is wrong with them.
SHOWN_ATTEMPTS = 5
SHOWN_NODES = 16
#: Words in a node's state that keep jobs off it, as `sinfo` writes them.
_BAD = ("down", "drain", "fail", "error", "inval", "unknown", "not_responding", "reboot")
_STANDING_S = 30.0


def run_sections(run: RunDir, config: Config) -> list[Section]:
    """What can be said of a run besides its machine; for one on Slurm that is all."""
    sections = [
        Section(title="Run", look=lambda: _standing(run), within_s=_STANDING_S),
        Section(title="Attempts", look=lambda: attempts(run)),
        Section(title="Preflight", look=lambda: preflight(run)),
    ]
    if job_of(run) is None:
        return sections
    return [
        *sections,
        Section(title="Nodes, by Slurm", look=lambda: _node_states(run), within_s=_STANDING_S),
        Section(title="Nodes, looked at", look=lambda: _live(run, config), within_s=LOOK_S + _STANDING_S),
    ]


# --- how it stands


def _standing(run: RunDir) -> list[Check]:
    now = stand(run, look_now(run))
    checks = [standing_check(run, now)]
    if now.away:
        text = f"Slurm cannot be asked: {now.away}"
        fix = "what is said of nodes below may be old; see `hpcdist doctor`"
        checks.append(Check(name="Slurm", level="warning", text=text, fix=fix))
    started = (read_json(run.environment) or {}).get("host", "")
    if job_of(run) is None and started and started != socket.gethostname():
        text = f"it was started on {started}, and this is {socket.gethostname()}: what follows is about this machine"
        checks.append(Check(name="host", level="note", text=text, fix=f"`hpcdist doctor {run.name}` on {started}"))
    if (held := holder(run)) is not None:
        ago = max(0, int(time.time() - float(held["renewed"])))
        text = f"process {held['pid']} of {held['user']} on {held['host']}, last sign {ago} s ago"
        checks.append(Check(name="held by", level="ok", text=text))
    return checks


def standing_check(run: RunDir, now: Standing) -> Check:
    """How a run stands, and what to do where that is not as it should be."""
    text = now.sentence
    if now.facts is not None and now.facts.sentence() not in text:
        text += f"; {now.facts.describe(time.time())}"
    if now.name == "lost":
        fix = f"`hpcdist resume {run.name}` goes on, `hpcdist sync {run.name}` closes it in MLflow"
        return Check(name="state", level="warning", text=text, fix=fix)
    if now.name == "failed":
        return Check(name="state", level="warning", text=text, fix=f"why: `hpcdist explain {run.name}`")
    return Check(name="state", level="ok", text=text)


# --- what has failed where


def attempts(run: RunDir) -> list[Check]:
    """Which node each failed attempt failed on; a warning where it is always the same one."""
    found = [(attempt, failure) for attempt in run.attempts() if (failure := read_json(attempt.failure)) is not None]
    if not found:
        started = len(run.attempts())
        text = f"{started} started, none has failed" if started else "none was started yet"
        return [Check(name="attempts", level="ok", text=text)]
    checks = [_failed(attempt, failure) for attempt, failure in found[-SHOWN_ATTEMPTS:]]
    if len(found) > SHOWN_ATTEMPTS:
        text = f"{len(found) - SHOWN_ATTEMPTS} earlier ones failed, too"
        checks.insert(0, Check(name="attempts", level="note", text=text))
    by_host = Counter(str(failure.get("host", "")) for _, failure in found)
    host, times = by_host.most_common(1)[0]
    if host and times > 1 and len(by_host) == 1 and job_of(run) is not None:
        text = f"all {times} failures were here and on no other node"
        fix = f"`hpcdist resume {run.name} cluster.exclude={host.partition('.')[0]}`, and tell the cluster's staff"
        checks.append(Check(name="suspect", level="warning", text=text, fix=fix, node=host))
    return checks


def _failed(attempt: Attempt, failure: dict[str, Any]) -> Check:
    step = f" at step {failure['step']}" if failure.get("step") is not None else ""
    what = " ".join(str(failure.get("error", "")).split())
    return Check(
        name=f"attempt {attempt.number}",
        level="note",
        text=f"rank {failure.get('rank')} failed{step}: {what[:200]}",
        node=str(failure.get("host", "")),
    )


@dataclass(frozen=True, kw_only=True)
class _Preflight:
    """The content of `preflight.json` that is shown here."""

    nodes: list[str] = field(default_factory=list)
    checks: list[Any] = field(default_factory=list)


def preflight(run: RunDir) -> list[Check]:
    """What was found on the nodes before the newest attempt that looked at them."""
    looked = [attempt for attempt in run.attempts() if attempt.preflight.is_file()]
    if not looked:
        return []
    newest = looked[-1]
    saved = fill(_Preflight, read_json(newest.preflight) or {}, newest.preflight)
    ago = max(0, int(time.time() - newest.preflight.stat().st_mtime)) // 60
    when = f"before attempt {newest.number}, {ago} min ago, on {len(saved.nodes)} nodes"
    checks = [fill(Check, check, newest.preflight) for check in saved.checks if isinstance(check, dict)]
    bad = [check for check in checks if LEVELS.index(check.level) >= LEVELS.index("warning")]
    head = f"{len(bad)} finding{'s' * (len(bad) != 1)}" if bad else "all was well"
    return [Check(name="result", level="note" if bad else "ok", text=f"{head} {when}"), *bad]


# --- its nodes


def nodes_of(run: RunDir, now: Standing) -> list[str]:
    """Nodes of the run's job in all its lives, those of the present one first."""
    present = expand(now.facts.nodes) if now.facts is not None and now.facts.nodes else []
    earlier = [node for life in reversed(job_lives(run)) for node in expand(str(life.get("nodes", "")))]
    return list(dict.fromkeys([*present, *earlier]))


def _node_states(run: RunDir) -> list[Check]:
    nodes = nodes_of(run, stand(run, look_now(run)))
    if not nodes:
        return []
    try:
        states = client.node_states(names=nodes)
    except SlurmError as error:
        text = f"Slurm does not say how they are: {error}"
        return [Check(name="nodes", level="warning", text=text, fix="see `hpcdist doctor`")]
    return node_checks(states, nodes)


def node_checks(states: Sequence[NodeState], nodes: Sequence[str]) -> list[Check]:
    """Return a check for each of `nodes`, those that Slurm starts no jobs on first."""
    known = {state.name: state for state in states}
    bad, well = [], []
    for node in nodes:
        found = known.get(node)
        if found is None:
            text = "Slurm knows no such node any more"
            bad.append(Check(name=node, level="warning", text=text, node=node))
            continue
        if found.state.lower().startswith(_BAD) or "*" in found.state:
            bad.append(_unfit(found))
        else:
            well.append((node, found.state))
    shown = [Check(name=node, level="ok", text=state, node=node) for node, state in well[:SHOWN_NODES]]
    if len(well) > SHOWN_NODES:
        counts = Counter(state for _, state in well[SHOWN_NODES:])
        text = ", ".join(f"{count} {state}" for state, count in counts.items())
        shown.append(Check(name="others", level="ok", text=text))
    return bad + shown


def _unfit(node: NodeState) -> Check:
    words = [node.state + (" (does not answer)" if "*" in node.state else "")]
    if node.since is not None:
        words.append(f"since {time.strftime('%Y-%m-%d %H:%M', time.localtime(node.since))}")
    if node.reason:
        words.append(f"{node.reason!r}" + (f" by {node.user}" if node.user else ""))
    fix = "Slurm starts nothing there; `hpcdist resume` gets other nodes. "
    fix += f"Once it is mended staff runs `scontrol update nodename={node.name} state=resume`"
    return Check(name=node.name, level="warning", text=", ".join(words), fix=fix, node=node.name)


def _live(run: RunDir, config: Config) -> list[Check]:
    """What the nodes say themselves, while the run's job has them."""
    now = stand(run, look_now(run))
    job = job_of(run)
    if now.facts is None or job is None or now.facts.state != "RUNNING" or shutil.which("srun") is None:
        text = "the run has no nodes at present, so only Slurm's word of them is to be had"
        return [Check(name="nodes", level="ok", text=text)]
    if config.cluster.roles and len(now.facts.nodes.split(",")) > 1 and config.cluster.het is not False:
        text = "a heterogeneous job's nodes are not looked at while it runs; see its preflight"
        return [Check(name="nodes", level="note", text=text)]
    return look_at_nodes(run, config, job.id, expand(now.facts.nodes))
