"""How jobs end on this cluster: what Slurm's settings mean for a run, in words."""

from __future__ import annotations

from hpcdist.diagnostics.doctor.slurm import Answers, few
from hpcdist.machine.check import Check
from hpcdist.slurm.cluster_nodes import Partition
from hpcdist.slurm.command_output import parse_seconds

#: Enough for a checkpoint of some gigabytes on an ordinary file system; less is worth a word.
_EASY_S = 30


def endings(found: Answers) -> list[Check]:
    """What Slurm's settings make of the end of a job: how long ranks have to save, and who puts the run back."""
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
    told = (
        "Slurm's user signal comes ahead of it (preempt_send_user_signal)"
        if "preempt_send_user_signal" in settings.get("SlurmctldParameters", "")
        else "SIGTERM announces it, which is enough for hpcdist (no preempt_send_user_signal)"
    )
    if settings.get("PreemptType", "preempt/none") in ("preempt/none", "(null)"):
        off = "off: no job is ended for another one's sake"
        return [_end(kill_wait), Check(name="preemption", level="ok", text=off)]
    by_qos = settings["PreemptType"].endswith("/qos")
    modes: dict[tuple[str, int], list[str]] = {}
    for one in partitions:
        mode = one.facts.get("PreemptMode", settings.get("PreemptMode", "")).split(",")[-1]
        modes.setdefault((mode, parse_seconds(one.facts.get("GraceTime", "0")) or 0), []).append(one.name)
    said = f"decided by {'quality of service (a QOS may have another GraceTime)' if by_qos else 'partition'}; {told}"
    return [
        _end(kill_wait),
        Check(name="preemption", level="ok", text=said),
        *(_preempted(mode, grace, kill_wait, names) for (mode, grace), names in modes.items()),
    ]


def _end(kill_wait: int) -> Check:
    text = f"`scancel` sends SIGTERM, and SIGKILL {kill_wait} s later (KillWait)"
    text += "; ahead of its time limit a run saves by itself (cluster.signal_lead_s)"
    return Check(name="job ends", level="ok", text=text)


def _preempted(mode: str, grace: int, kill_wait: int, names: list[str]) -> Check:
    where = f"preempted in {few(names)}"
    if mode in ("OFF", "DISABLED"):
        return Check(name="preemption", level="ok", text=f"jobs in {few(names)} are never preempted")
    if mode in ("SUSPEND", "GANG"):
        text = f"{where}: processes are stopped where they are, and go on later with their memory kept"
        fix = "ranks that wait meanwhile are no hang: raise launch.hang_timeout_s above the usual pause"
        return Check(name="preemption", level="note", text=text, fix=fix)
    then = "puts the run back into the queue" if mode == "REQUEUE" else "does not put the run back (PreemptMode=CANCEL)"
    total = grace + kill_wait
    text = f"{where}: SIGTERM, and SIGKILL {total} s later (GraceTime {grace} + KillWait {kill_wait}); Slurm {then}"
    fix = "" if mode == "REQUEUE" else "`hpcdist resume RUN` submits it again"
    if total < _EASY_S:
        more = f"a step and a checkpoint have to fit into {total} s, else the steps since the newest one are lost:"
        more += " set checkpoint.every_steps with that in mind, or ask for a longer GraceTime"
        return Check(name="preemption", level="note", text=text, fix="; ".join(filter(None, [fix, more])))
    return Check(name="preemption", level="ok" if mode == "REQUEUE" else "note", text=text, fix=fix)


def _requeue(settings: dict[str, str]) -> list[Check]:
    checks = []
    codes = {
        name: settings.get(name, "(null)")
        for name in ("RequeueExit", "RequeueExitHold")
        if settings.get(name, "(null)") not in ("(null)", "")
    }
    ours = {name: value for name, value in codes.items() if {"1", "2"} & _numbers(value)}
    if ours:
        said = ", ".join(f"{name}={value}" for name, value in ours.items())
        checks.append(
            Check(
                name="requeue",
                level="warning",
                text=f"{said}: Slurm queues jobs again that end with 1 or 2, so a run that failed for good starts anew",
                fix="cluster.sbatch={no-requeue: true} for runs that must not, or ask for other codes",
            )
        )
    if settings.get("JobRequeue", "1") == "0":
        text = "off by default here (JobRequeue=0); hpcdist asks for it with each job (--requeue)"
        checks.append(Check(name="requeue", level="ok", text=text))
    return checks


def _numbers(text: str) -> set[str]:
    """Exit codes of `1-3,42`."""
    found: set[str] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            found |= {str(code) for code in range(int(first), int(last if last.isdigit() else first) + 1)}
    return found


def _lost_node(settings: dict[str, str]) -> list[Check]:
    timeout = parse_seconds(settings.get("SlurmdTimeout", ""))
    if timeout == 0:
        text = "a node that dies is never given up by Slurm (SlurmdTimeout=0)"
        fix = "hpcdist asks for a requeue itself; the node stays `idle*` until staff looks at it"
        return [Check(name="lost node", level="note", text=text, fix=fix)]
    if timeout is None:
        return []
    return [Check(name="lost node", level="ok", text=f"Slurm notices it within {timeout} s (SlurmdTimeout)")]


def _left_processes(settings: dict[str, str]) -> list[Check]:
    tracking = settings.get("ProctrackType", "").removeprefix("proctrack/")
    stuck = parse_seconds(settings.get("UnkillableStepTimeout", ""))
    text = f"processes are found by {tracking} when a job ends"
    if stuck:
        text += f"; one that cannot be killed for {stuck} s drains its node (UnkillableStepTimeout)"
    if tracking == "pgid":
        text += ", and those that leave their process group are not found"
        fix = "look for what is left with `ps` on the node; staff can set ProctrackType=proctrack/cgroup"
        return [Check(name="clean-up", level="note", text=text, fix=fix)]
    return [Check(name="clean-up", level="ok", text=text)] if tracking else []


def _arrays(settings: dict[str, str]) -> list[Check]:
    size = settings.get("MaxArraySize", "")
    if not size.isdigit():
        return []
    if int(size) <= 1:
        text = "job arrays are off (MaxArraySize): `hpcdist submit --sweep` would be refused"
        return [Check(name="sweeps", level="note", text=text, fix="submit the cells one by one")]
    return [Check(name="sweeps", level="ok", text=f"up to {int(size) - 1} runs in one array (MaxArraySize)")]
