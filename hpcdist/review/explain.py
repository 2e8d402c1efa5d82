"""Causes of a failed or waiting run (`hpcdist explain`), with the patterns of known failures."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hpcdist
from hpcdist.host.files import open_regular, read_json, stays_inside
from hpcdist.host.log_files import MAX_LINE_CHARS, last_lines
from hpcdist.review.facts import HOST_MEMORY_FIX, JOB_ENDS, NODE_FIX, TIME_FIX, read_attempts, read_checkpoints
from hpcdist.review.text import one_line
from hpcdist.run.folder import Attempt, RunDir, sentence_of
from hpcdist.run.records import continuation, read_times
from hpcdist.run.status import RunStatus, status_of

QUOTE_CHARS = 160
_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+)')
_LIBRARY = re.compile(r"^<|/(?:site|dist)-packages/|/lib(?:64)?/python3")
_PACKAGE = Path(hpcdist.__file__).parent


@dataclass(frozen=True)
class Pattern:
    name: str
    texts: str  #: a regular expression
    cause: str  #: `{0}` is replaced by the first matched group of `texts`
    fix: str


HANG_FIX = "see the ranks' stack traces; if a step may take that long, raise the named timeout"

#: Ordered: the first match is reported, so causes come before their consequences.
PATTERNS = (
    Pattern(
        "cuda-out-of-memory",
        r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA error: out of memory",
        "the GPU's memory is full",
        "reduce data.batch_size, set precision.dtype=bf16, or use GPUs with more memory (cluster.constraint)",
    ),
    Pattern(
        "out-of-memory",
        r"oom[-_]kill|Out Of Memory|Out of memory: Killed process|exceeded (?:step|job) memory limit"
        r"|can't allocate memory|Cannot allocate memory|^MemoryError|: MemoryError|OUT_OF_MEMORY",
        "the host's memory, or the job's share of it, is exhausted",
        HOST_MEMORY_FIX,
    ),
    Pattern(
        "shared-memory",
        r"DataLoader worker .*Bus error|insufficient shared memory|unable to (?:write|open).*/torch_\d+",
        "shared memory (/dev/shm) is too small for the data workers",
        "set data.num_workers=0, or enlarge /dev/shm (a container's --shm-size or --ipc=host)",
    ),
    Pattern(
        "disk-full",
        r"No space left on device|ENOSPC|Disk quota exceeded|unexpected pos \d+ vs \d+",
        "a disk is full, or a quota is exceeded",
        "free space in the named folder (`df -h`, `quota`), then `hpcdist resume`; the last checkpoint is complete",
    ),
    Pattern(
        "missing-module",
        r"ModuleNotFoundError: No module named '([\w.]+)'|ImportError: cannot import name '(\w+)'",
        "the ranks' Python does not find {0}",
        "install it in the nodes' environment, or start the run from the folder that contains it",
    ),
    Pattern(
        "driver-too-old",
        r"NVIDIA driver on your system is too old|CUDA driver version is insufficient for CUDA runtime version"
        r"|forward compatibility was attempted on non supported HW|no kernel image is available for execution",
        "the node's NVIDIA driver does not fit this PyTorch's CUDA",
        "install a PyTorch for an older CUDA (`pip install torch --index-url …/cuXYZ`), or update the driver",
    ),
    Pattern(
        "no-driver",
        r"Found no NVIDIA driver on your system|no CUDA-capable device is detected|No CUDA GPUs",
        "the ranks see no GPU",
        "request GPUs (cluster.gpus_per_node), or set launch.device=cpu",
    ),
    Pattern(
        "port-taken",
        r"is not rank 0 of this attempt|does another program listen on this port|EADDRINUSE|[Aa]ddress already in use",
        "another program uses rank 0's port",
        "`hpcdist resume`: each attempt uses another port; HPCDIST_MASTER_PORT in launch.env sets one",
    ),
    Pattern("node-failure", r"Node failure on (\S+)|NODE FAILURE|; lost (\S+)", "a node failed: {0}", NODE_FIX),
    Pattern("time-limit", r"DUE TO TIME LIMIT", "the job reached its time limit", TIME_FIX),
    Pattern(
        "preempted",
        r"DUE TO PREEMPTION",
        "a job of higher priority took the nodes",
        "none if Slurm requeues the job; otherwise `hpcdist resume` goes on from the newest checkpoint",
    ),
    Pattern(
        "not-started",
        r"Unable to create step for job \d+: Requested nodes are busy|step creation (?:temporarily|still) disabled"
        r"|(?:no rank|rank \d+ .*) was (?:not )?started .*(?:within launch\.init_timeout_s|at all)"
        r"|step \S+ \(attempt-\d+\) does not end",
        "Slurm did not start the ranks: another step holds the job's resources, or a node does not launch tasks",
        "`squeue --steps --jobs=JOB` shows the job's steps; launch.init_timeout_s gives more time",
    ),
    Pattern(
        "revoked",
        r"Job credential revoked|launch failed requeued held|Unable to create step for job",
        "Slurm could not start the job's processes on the node",
        "`hpcdist resume` submits the job again; if the error returns, cluster.exclude avoids the node",
    ),
    Pattern(
        "hang",
        r"made no progress for launch\.hang_timeout_s|did not save and exit within launch\.stop_grace_s",
        "the ranks hung",
        HANG_FIX,
    ),
    Pattern(
        "collective-timeout",
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for \w+ operation|Socket Timeout"
        r"|collective operation.* timed out|wait timeout after \d+ms",
        "a collective operation timed out: a rank did not take part",
        "inspect the missing rank: it hangs, or its code called other collectives (py-spy, NCCL_DEBUG=INFO)",
    ),
    Pattern(
        "unreachable",
        r"cannot reach the master at|could not connect to the other ranks at|The client socket has timed out",
        "the ranks could not connect to each other",
        "check the network between the nodes (firewall, GLOO_SOCKET_IFNAME); launch.init_timeout_s gives more time",
    ),
    Pattern(
        "peer-lost",
        r"Connection (?:closed|reset) by peer|Broken pipe|nccl(?:Remote|System)Error",
        "the ranks lost their connection, and none of them reported another cause",
        "see the ranks' logs, and check the network between the nodes",
    ),
    Pattern(
        "killed",
        r"was killed by SIGKILL",
        "the rank was killed from outside: by the kernel when memory runs out, or by a user or program",
        "run `dmesg -T | grep -i oom` on that host; " + HOST_MEMORY_FIX,
    ),
    Pattern(
        "crashed",
        r"was killed by (SIG(?:SEGV|BUS|ILL|ABRT|FPE))|(Segmentation fault)|(Bus error)",
        "native code crashed ({0})",
        "check C libraries and the size of shared memory; PYTHONFAULTHANDLER=1 in launch.env shows the stack",
    ),
)

_LESS_FIX = "wait, or request fewer nodes or a shorter cluster.time_limit_min"
#: Slurm's reasons for a pending job: meaning, and how to shorten the wait.
WAITING = {
    "Priority": ("jobs of higher priority run first", _LESS_FIX),
    "Resources": ("no suitable nodes are free", _LESS_FIX),
    "BeginTime": ("its requested start time is in the future, or Slurm has just requeued it", "wait"),
    "Dependency": ("it waits for another job", "wait; `scontrol show job` names it"),
    "DependencyNeverSatisfied": ("the job that it depends on has failed", "cancel it and submit it again"),
    "JobHeldUser": ("the user holds it", "`scontrol release` releases it"),
    "JobHeldAdmin": ("an administrator holds it", "contact the administrators"),
    "PartitionTimeLimit": ("the partition allows less time", "reduce cluster.time_limit_min and submit again"),
    "PartitionNodeLimit": ("the partition allows fewer nodes", "reduce cluster.nodes and submit again"),
    "PartitionDown": ("the partition is down", "wait, or set another cluster.partition"),
    "ReqNodeNotAvail": ("requested nodes are down or reserved", "wait, or relax cluster.constraint or cluster.exclude"),
    "JobArrayTaskLimit": ("the sweep's limit of parallel cells is reached", "wait, or raise --array-parallelism"),
    "launch_failed_requeued_held": ("its start failed on a node, so Slurm holds it", "`scontrol release` retries it"),
}


def first_match(lines: Iterable[str]) -> tuple[Pattern, int] | None:
    """Return the first pattern that any line matches, and the index of that line."""
    searched = list(lines)
    for pattern in PATTERNS:
        search = re.compile(pattern.texts).search
        if (number := next((number for number, line in enumerate(searched) if search(line)), None)) is not None:
            return pattern, number
    return None


def quote(line: str) -> str:
    return one_line(line, QUOTE_CHARS)


#: Attempts of a finished run that are listed.
MAX_ATTEMPTS = 4
#: Lines searched at the end of a log, and number of logs searched.
MAX_LINES = 20_000
MAX_LOGS = 64


@dataclass(frozen=True, kw_only=True)
class Finding:
    cause: str
    evidence: str = ""
    fix: str = ""
    code: str = ""  #: the line of the user's code that failed, `FILE:LINE`


def explain(run: RunDir) -> list[str]:
    """Return a healthy run's one line, else status, cause, evidence, fix and Slurm's job state, and stragglers last."""
    now = status_of(run, history=True)
    straggling = run.attempt(now.state.attempt).current_stragglers() if now.state.attempt else []
    return [*_explain(run, now), *(f"{'slow:':<10}{text}" for text in straggling)]


def _explain(run: RunDir, now: RunStatus) -> list[str]:
    state = now.state
    if now.name == "finished":
        times = f" after {state.restarts} restart{'s' * (state.restarts != 1)}" if state.restarts else ""
        earlier = [one for one in read_attempts(run, state, read_checkpoints(run)) if one.status != "finished"]
        return [
            f"finished{times}: {state.reason}" + "; nothing to explain" * (not earlier),
            *(f"{f'{one.number}:':<10}{quote(sentence_of(one.status, one.cause))}" for one in earlier[-MAX_ATTEMPTS:]),
        ]
    if now.name == "created":
        return [f"created, but never started; `hpcdist resume {run.name}` starts it"]
    finding = _finding(run, now)
    if finding is None:
        attempt, life = run.attempt(state.attempt), ""
        if state.attempt and attempt.silence.is_file():
            stacks = attempt.silence.relative_to(run.path)
            life = f" (but once it made no progress for launch.hang_timeout_s; stacks: {stacks})"
        elif state.attempt and attempt.beat(0).is_file():
            ago = int(time.time() - attempt.beat(0).stat().st_mtime)
            life = f" (but rank 0 sent its last heartbeat {ago} s ago)" if ago > 60 else ""
        return [f"{quote(now.sentence)}; nothing to explain{life}"]
    lines = {
        "status": quote(now.sentence),
        "cause": finding.cause,
        "evidence": finding.evidence,
        "fix": finding.fix,
        "slurm": now.facts.describe(time.time()) if now.facts else now.slurm_error,
    }
    return [f"{name + ':':<10}{text}" for name, text in lines.items() if text]


def _finding(run: RunDir, now: RunStatus) -> Finding | None:
    state, facts = now.state, now.facts
    if now.name == "queued":
        if facts is None or not facts.reason:
            return None
        # `ReqNodeNotAvail,_UnavailableNodes:n[1-2]`
        meaning, fix = WAITING.get(facts.reason.split(",")[0], ("", ""))
        if not meaning and facts.reason.startswith(("Assoc", "QOS")):
            meaning, fix = "a limit of the account or quality of service is reached", "wait, or request fewer resources"
        return Finding(cause=f"{meaning} ({facts.reason})" if meaning else facts.reason, fix=fix)
    if now.name == "running":
        # The newest attempt that failed; others ended by a requeue or a stop.
        for number in range(state.attempt - 1, 0, -1) if state.restarts else ():
            times = read_times(run.attempt(number))
            if times is None or times.failed or times.ended is None:
                return explain_attempt(run, run.attempt(number))
        return None
    if facts is not None and (facts.state in JOB_ENDS or facts.out_of_memory):
        end = "OUT_OF_MEMORY" if facts.out_of_memory else facts.state
        # Cancelling the job after the run has failed is not the cause.
        if end != "CANCELLED" or now.name in ("lost", "cancelled"):
            cause, fix = JOB_ENDS[end]
            evidence = f"Slurm: {facts.sentence()}" + (f", MaxRSS {facts.max_rss}" if facts.max_rss else "")
            return Finding(cause=cause, evidence=evidence, fix=fix or continuation(run))
    if now.name in ("stopped", "cancelled"):
        return Finding(cause=state.reason, fix=continuation(run))
    if state.attempt:
        found = explain_attempt(run, run.attempt(state.attempt), "" if now.is_lost else state.reason)
    else:
        found = _of_logs(run, _batch_logs(run))
    if found is not None:
        return found
    if now.is_lost:
        return Finding(cause=now.reason or "its supervisor was killed", fix=continuation(run))
    return Finding(cause=state.reason or "no cause was recorded", evidence=f"logs in {run.path}/attempts")


def explain_attempt(run: RunDir, attempt: Attempt, reason: str = "", *, read_logs: bool = True) -> Finding | None:
    """Explain the end of an attempt; None if nothing about it is known.

    The error of the rank that the supervisor's record names is the cause, else what the logs say about a rank that
    could not report one, else the record itself.

    Args:
        reason: the sentence that ended the run; by default the one recorded for the attempt.
        read_logs: whether to search the logs, some of which all attempts share.
    """
    times, record = read_times(attempt), read_json(attempt.failure) or {}
    reason = reason or (times.reason if times is not None else "") or str(record.get("error", ""))
    if record.get("kind") == "unfit":
        for check in (read_json(attempt.preflight) or {}).get("checks", ()):
            if check["level"] == "failure":
                where = f"{check['node']} is" if check["node"] else "the nodes are"
                return Finding(
                    cause=f"{where} unfit for a run: {check['name']}: {check['text']}",
                    evidence=f"{attempt.preflight.with_suffix('.txt').relative_to(run.path)}, before the ranks started",
                    fix=check["fix"],
                )
    failed = _failed_ranks(attempt, first=record.get("rank"))
    if failed and not failed[0][1].get("peer_lost"):
        return _of_outcome(run, attempt, *failed[0])
    # The stack traces that were collected before the ranks were killed.
    hang = None
    with suppress(FileNotFoundError), open_regular(attempt.stacks_summary) as file:
        sentence = file.readline(MAX_LINE_CHARS).decode(errors="replace").rstrip("\n")
        summary = attempt.stacks_summary.relative_to(run.path)
        hang = Finding(
            cause=f"the ranks hung: {sentence}",
            evidence=f"{summary}, and each rank's stack trace in {summary.parent}/rank-*.log",
            fix=HANG_FIX,
        )
    if read_logs:
        # The collected stacks are more specific than a log's message about a hang; lost peers are a consequence.
        ignored = ("peer-lost", "collective-timeout", *(["hang"] if hang is not None else []))
        logs = sorted(attempt.path.glob("rank-*.log"))[:MAX_LOGS]
        logs = [path for path in logs if stays_inside(path, run.path)]  # a rank may have replaced its log by a link
        if (found := _of_logs(run, [attempt.path / "srun.log", *_batch_logs(run), *logs], ignored)) is not None:
            return found
    if hang is not None:
        return hang
    if (match := first_match([reason])) is not None:
        return _known(match[0], reason, quote(reason))
    if reason and record.get("rank") not in dict(failed):
        return Finding(cause=quote(reason), evidence=f"logs in {attempt.path.relative_to(run.path)}")
    return _of_outcome(run, attempt, *failed[0]) if failed else None


def first_failed_rank(attempt: Attempt) -> int | None:
    rank = (read_json(attempt.failure) or {}).get("rank")
    if isinstance(rank, int):
        return rank
    return next((rank for rank, _ in _failed_ranks(attempt, first=None)), None)  # of a rejected config, for example


def _failed_ranks(attempt: Attempt, first: object) -> list[tuple[int, dict[str, Any]]]:
    """Return the outcomes of the ranks that failed: those that failed by themselves first, rank `first` before all."""
    failed = [item for item in attempt.outcomes().items() if item[1]["outcome"] in ("failed", "rejected")]
    return sorted(failed, key=lambda item: (bool(item[1].get("peer_lost")), item[0] != first, item[1]["time"]))


def _of_outcome(run: RunDir, attempt: Attempt, rank: int, outcome: Mapping[str, Any]) -> Finding:
    # The rest of the rank's log is not searched, because a warning there is not the cause.
    error, trace = str(outcome["error"]), "".join(outcome["traceback"]).splitlines()
    lines = [error, *trace]
    if (match := first_match(lines)) is not None:
        pattern, line = match[0], lines[match[1]]
        return _known(pattern, line, _cite_line(run, attempt, rank, line))
    evidence = _cite_line(run, attempt, rank, error)
    if outcome["outcome"] == "rejected" and not trace:
        fix = f"correct the key, then `hpcdist resume {run.name} key=value …`"
        return Finding(cause="the configuration cannot run on these nodes", evidence=evidence, fix=fix)
    frame = None  # the innermost one in the user's code
    for text in trace:
        one = _FRAME.search(text)
        if one is not None and not _LIBRARY.search(one["file"]):
            # A copy of hpcdist, as an environment of ranks has it, contains the same modules.
            package, _, module = one["file"].rpartition("/hpcdist/")
            frame = frame if package and (_PACKAGE / module).is_file() else one
    place = f"{frame['file']}:{frame['line']}" if frame else ""
    last = next((line.strip() for line in reversed(trace) if line.lstrip().startswith("File ")), "")
    where = frame.string.strip() if frame else last
    cause = quote(f"an exception in the training code{f', at {where}' if where else ''}")
    if place and re.search(r"\b(Syntax|Indentation|Tab)Error: ", error):
        cause = f"a syntax error in {place}"
    fix = f"fix {place or 'the code'}, then `hpcdist resume {run.name} --with-current-code`"
    return Finding(cause=cause, evidence=evidence, fix=fix, code=place)


def _of_logs(run: RunDir, paths: Iterable[Path], ignored: Sequence[str] = ()) -> Finding | None:
    for path in filter(Path.is_file, paths):
        lines = last_lines(path, MAX_LINES)
        if (match := first_match(line for _, line in lines)) is not None and match[0].name not in ignored:
            number, line = lines[match[1]]
            return _known(match[0], line, _cite(run, path, number, line))
    return None


def _known(pattern: Pattern, line: str, evidence: str) -> Finding:
    match = re.search(pattern.texts, line)
    named = next((group for group in match.groups() if group), None) if match else None
    return Finding(cause=pattern.cause.format(named or "").rstrip(": "), evidence=evidence, fix=pattern.fix)


def _batch_logs(run: RunDir) -> list[Path]:
    found = [path for path in (run.path / "submitit").glob("*") if path.suffix in (".out", ".err")]
    return [*sorted(found, key=lambda path: path.stat().st_mtime)[-1:], run.path / "supervisor.log"]


def _cite(run: RunDir, path: Path, number: int, line: str) -> str:
    # The number is 0 where it is unknown.
    return f"{path.relative_to(run.path)}:{f'{number}:' if number else ''} {quote(line)}"


def _cite_line(run: RunDir, attempt: Attempt, rank: int, line: str) -> str:
    # From the outcome file if the log does not contain it.
    path = attempt.log(rank)
    text = next((part for part in line.splitlines() if part.strip()), line).strip()
    if path.is_file() and stays_inside(path, run.path):
        for number, content in reversed(last_lines(path, MAX_LINES)):
            if text in content:
                return _cite(run, path, number, content)
    return f"{attempt.outcome(rank).relative_to(run.path)}: {quote(text)}"
