"""Checks of Slurm's settings for the end of jobs: preemption, requeue, lost nodes, clean-up."""

from __future__ import annotations

from hpcdist.diagnostics.doctor.slurm_checks import SlurmFacts, few
from hpcdist.machine.check import Check, note, ok, warning
from hpcdist.slurm.cluster_nodes import Partition
from hpcdist.slurm.command_output import parse_seconds

#: Enough to save a checkpoint of some gigabytes on an ordinary file system.
_EASY_S = 30


def job_end_checks(found: SlurmFacts) -> list[Check]:
    """Explain the settings: how long ranks may save, and whether Slurm requeues the run."""
    if not found.reached:
        return []
    settings = found.settings
    return [
        *_preemption(settings, found.partitions or []),
        *_requeue(settings),
        *_lost_node(settings),
        *_left_processes(settings),
        *_arrays(settings),
    ]


def _preemption(settings: dict[str, str], partitions: list[Partition]) -> list[Check]:
    kill_wait = parse_seconds(settings.get("KillWait", "")) or 0
    announced = (
        "Slurm sends the user signal before it (preempt_send_user_signal)"
        if "preempt_send_user_signal" in settings.get("SlurmctldParameters", "")
        else "SIGTERM announces it, which suffices for hpcdist (preempt_send_user_signal is not set)"
    )
    if settings.get("PreemptType", "preempt/none") in ("preempt/none", "(null)"):
        off = "off: no job ends because of another one"
        return [_cancel(kill_wait), ok("preemption", off)]
    by_qos = settings["PreemptType"].endswith("/qos")
    modes: dict[tuple[str, int], list[str]] = {}
    for one in partitions:
        mode = one.facts.get("PreemptMode", settings.get("PreemptMode", "")).split(",")[-1]
        modes.setdefault((mode, parse_seconds(one.facts.get("GraceTime", "0")) or 0), []).append(one.name)
    text = (
        f"decided by {'quality of service (a QOS may have another GraceTime)' if by_qos else 'partition'}; {announced}"
    )
    return [
        _cancel(kill_wait),
        ok("preemption", text),
        *(_preempted(mode, grace, kill_wait, names) for (mode, grace), names in modes.items()),
    ]


def _cancel(kill_wait: int) -> Check:
    text = f"`scancel` sends SIGTERM, and SIGKILL {kill_wait} s later (KillWait)"
    text += "; a run saves a checkpoint before its time limit (cluster.signal_lead_s)"
    return ok("job ends", text)


def _preempted(mode: str, grace: int, kill_wait: int, names: list[str]) -> Check:
    where = f"preempted in {few(names)}"
    if mode in ("OFF", "DISABLED"):
        return ok("preemption", f"jobs in {few(names)} are never preempted")
    if mode in ("SUSPEND", "GANG"):
        text = f"{where}: Slurm suspends the processes and resumes them later with their memory"
        fix = "set launch.hang_timeout_s above the usual pause, so that suspended ranks do not count as hung"
        return note("preemption", text, fix)
    then = "requeues the run" if mode == "REQUEUE" else "does not requeue the run (PreemptMode=CANCEL)"
    total = grace + kill_wait
    text = f"{where}: SIGTERM, and SIGKILL {total} s later (GraceTime {grace} + KillWait {kill_wait}); Slurm {then}"
    fix = "" if mode == "REQUEUE" else "`hpcdist resume RUN` submits it again"
    if total < _EASY_S:
        more = f"a step and a checkpoint must fit into {total} s, or the steps since the newest checkpoint are lost:"
        more += " set checkpoint.every_steps accordingly, or ask for a longer GraceTime"
        return note("preemption", text, "; ".join(filter(None, [fix, more])))
    return Check(name="preemption", level="ok" if mode == "REQUEUE" else "note", text=text, fix=fix)


def _requeue(settings: dict[str, str]) -> list[Check]:
    checks = []
    codes = {
        name: settings.get(name, "(null)")
        for name in ("RequeueExit", "RequeueExitHold")
        if settings.get(name, "(null)") not in ("(null)", "")
    }
    conflicting = {name: value for name, value in codes.items() if {"1", "2"} & _numbers(value)}
    if conflicting:
        listed = ", ".join(f"{name}={value}" for name, value in conflicting.items())
        checks.append(
            warning(
                "requeue",
                f"{listed}: Slurm requeues jobs with exit code 1 or 2, so a failed run starts again",
                "cluster.sbatch={no-requeue: true} prevents it; administrators can set other codes",
            )
        )
    if settings.get("JobRequeue", "1") == "0":
        checks.append(ok("requeue", "off by default (JobRequeue=0); hpcdist sets --requeue for each job"))
    return checks


def _numbers(text: str) -> set[str]:
    """Return the exit codes of a list such as `1-3,42`."""
    found: set[str] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            found |= {str(code) for code in range(int(first), int(last if last.isdigit() else first) + 1)}
    return found


def _lost_node(settings: dict[str, str]) -> list[Check]:
    timeout = parse_seconds(settings.get("SlurmdTimeout", ""))
    if timeout == 0:
        text = "Slurm never marks an unresponsive node as down (SlurmdTimeout=0)"
        fix = "hpcdist requests the requeue; the node stays `idle*` until an administrator acts"
        return [note("lost node", text, fix)]
    if timeout is None:
        return []
    return [ok("lost node", f"Slurm detects it within {timeout} s (SlurmdTimeout)")]


def _left_processes(settings: dict[str, str]) -> list[Check]:
    tracking = settings.get("ProctrackType", "").removeprefix("proctrack/")
    stuck = parse_seconds(settings.get("UnkillableStepTimeout", ""))
    text = f"Slurm finds a job's processes by {tracking}"
    if stuck:
        text += f"; a process that cannot be killed within {stuck} s drains its node (UnkillableStepTimeout)"
    if tracking == "pgid":
        text += ", so processes outside their process group remain"
        fix = "check the node with `ps`; administrators can set ProctrackType=proctrack/cgroup"
        return [note("clean-up", text, fix)]
    return [ok("clean-up", text)] if tracking else []


def _arrays(settings: dict[str, str]) -> list[Check]:
    size = settings.get("MaxArraySize", "")
    if not size.isdigit():
        return []
    if int(size) <= 1:
        text = "job arrays are disabled (MaxArraySize): Slurm would reject `hpcdist submit --sweep`"
        return [note("sweeps", text, "submit the cells one at a time")]
    return [ok("sweeps", f"up to {int(size) - 1} runs in one array (MaxArraySize)")]
