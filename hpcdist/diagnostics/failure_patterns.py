"""Error messages of known failures, with cause and fix. Data and pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hpcdist

#: Maximum length of a quoted line.
QUOTE_CHARS = 160
_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+)')
_LIBRARY = re.compile(r"^<|/(?:site|dist)-packages/|/lib(?:64)?/python3")
_PACKAGE = Path(hpcdist.__file__).parent


@dataclass(frozen=True)
class Pattern:
    """One known failure."""

    name: str
    texts: re.Pattern[str]
    cause: str  #: `{0}` is replaced by the first matched group of `texts`
    fix: str


def _any(*texts: str) -> re.Pattern[str]:
    return re.compile("|".join(texts))


HOST_MEMORY_FIX = "request more (cluster.mem), or use less: smaller data.batch_size, fewer ranks per node"
NODE_FIX = (
    "cluster.exclude avoids the node; if the run has ended, `hpcdist resume` continues from the newest checkpoint"
)
TIME_FIX = (
    "raise cluster.time_limit_min, or cluster.signal_lead_s so that the ranks can save; `hpcdist resume` continues"
)
HANG_FIX = "see the ranks' stack traces; if a step may take that long, raise the named timeout"

#: Ordered: the first match is reported, so causes come before their consequences.
PATTERNS = (
    Pattern(
        "cuda-out-of-memory",
        _any(r"CUDA out of memory", r"torch\.(?:cuda\.)?OutOfMemoryError", r"CUDA error: out of memory"),
        "the GPU's memory is full",
        "reduce data.batch_size, set precision.dtype=bf16, or use GPUs with more memory (cluster.constraint)",
    ),
    Pattern(
        "out-of-memory",
        _any(
            r"oom[-_]kill",
            r"Out Of Memory",
            r"Out of memory: Killed process",
            r"exceeded (?:step|job) memory limit",
            r"can't allocate memory",
            r"Cannot allocate memory",
            r"^MemoryError",
            r": MemoryError",
            r"OUT_OF_MEMORY",
        ),
        "the host's memory, or the job's share of it, is exhausted",
        HOST_MEMORY_FIX,
    ),
    Pattern(
        "shared-memory",
        _any(r"DataLoader worker .*Bus error", r"insufficient shared memory", r"unable to (?:write|open).*/torch_\d+"),
        "shared memory (/dev/shm) is too small for the data workers",
        "set data.num_workers=0, or enlarge /dev/shm (a container's --shm-size or --ipc=host)",
    ),
    Pattern(
        "disk-full",
        _any(r"No space left on device", r"ENOSPC", r"Disk quota exceeded", r"unexpected pos \d+ vs \d+"),
        "a disk is full, or a quota is exceeded",
        "free space in the named folder (`df -h`, `quota`), then `hpcdist resume`; the last checkpoint is complete",
    ),
    Pattern(
        "missing-module",
        _any(r"ModuleNotFoundError: No module named '([\w.]+)'", r"ImportError: cannot import name '(\w+)'"),
        "the ranks' Python does not find {0}",
        "install it in the nodes' environment, or start the run from the folder that contains it",
    ),
    Pattern(
        "driver-too-old",
        _any(
            r"NVIDIA driver on your system is too old",
            r"CUDA driver version is insufficient for CUDA runtime version",
            r"forward compatibility was attempted on non supported HW",
            r"no kernel image is available for execution",
        ),
        "the node's NVIDIA driver does not fit this PyTorch's CUDA",
        "install a PyTorch for an older CUDA (`pip install torch --index-url …/cuXYZ`), or update the driver",
    ),
    Pattern(
        "no-driver",
        _any(r"Found no NVIDIA driver on your system", r"no CUDA-capable device is detected", r"No CUDA GPUs"),
        "the ranks see no GPU",
        "request GPUs (cluster.gpus_per_node), or set launch.device=cpu",
    ),
    Pattern(
        "stranger-on-port",
        _any(r"is not rank 0 of this attempt", r"does another program listen on this port"),
        "another program answered on the port where the ranks meet",
        "`hpcdist resume`: each attempt uses another port; HPCDIST_MASTER_PORT in launch.env sets one",
    ),
    Pattern(
        "port-taken",
        _any(r"EADDRINUSE", r"[Aa]ddress already in use"),
        "another program uses rank 0's port",
        "`hpcdist resume`: each attempt uses another port; HPCDIST_MASTER_PORT in launch.env sets one",
    ),
    Pattern(
        "node-failure",
        _any(r"Node failure on (\S+)", r"NODE FAILURE", r"; lost (\S+)"),
        "a node failed: {0}",
        NODE_FIX,
    ),
    Pattern(
        "time-limit",
        _any(r"DUE TO TIME LIMIT"),
        "the job reached its time limit before the ranks had saved",
        TIME_FIX,
    ),
    Pattern(
        "preempted",
        _any(r"DUE TO PREEMPTION"),
        "a job of higher priority took the nodes",
        "none if Slurm requeues the job; otherwise `hpcdist resume` goes on from the newest checkpoint",
    ),
    Pattern(
        "not-started",
        _any(
            r"Unable to create step for job \d+: Requested nodes are busy",
            r"step creation (?:temporarily|still) disabled",
            r"(?:no rank|rank \d+ .*) was (?:not )?started .*(?:within launch\.init_timeout_s|at all)",
            r"step \S+ \(attempt-\d+\) does not end",
        ),
        "Slurm did not start the ranks: another step holds the job's resources, or a node does not launch tasks",
        "`squeue --steps --jobs=JOB` shows the job's steps; launch.init_timeout_s gives more time",
    ),
    Pattern(
        "revoked",
        _any(r"Job credential revoked", r"launch failed requeued held", r"Unable to create step for job"),
        "Slurm could not start the job's processes on the node",
        "`hpcdist resume` submits the job again; if the error returns, cluster.exclude avoids the node",
    ),
    Pattern(
        "hang",
        _any(r"made no progress for launch\.hang_timeout_s", r"did not save and exit within launch\.stop_grace_s"),
        "the ranks hung",
        HANG_FIX,
    ),
    Pattern(
        "collective-timeout",
        _any(
            r"Watchdog caught collective operation timeout",
            r"Timed out waiting \d+ms for \w+ operation",
            r"Socket Timeout",
            r"collective operation.* timed out",
            r"wait timeout after \d+ms",
        ),
        "a collective operation timed out: a rank did not take part",
        "inspect the missing rank: it hangs, or its code called other collectives (py-spy, NCCL_DEBUG=INFO)",
    ),
    Pattern(
        "unreachable",
        _any(
            r"cannot reach the master at",
            r"could not connect to the other ranks at",
            r"The client socket has timed out",
        ),
        "the ranks could not connect to each other",
        "check the network between the nodes (firewall, GLOO_SOCKET_IFNAME); launch.init_timeout_s gives more time",
    ),
    Pattern(
        "peer-lost",
        _any(r"Connection (?:closed|reset) by peer", r"Broken pipe", r"nccl(?:Remote|System)Error"),
        "the ranks lost their connection, and none of them reported another cause",
        "see the ranks' logs, and check the network between the nodes",
    ),
    Pattern(
        "ended-early",
        _any(r"ended with exit status 0 before the other ranks"),
        "one rank ended while the others still waited for it",
        "every rank must take part until the end of the training: see the log of the named rank for an early return",
    ),
    Pattern(
        "no-report",
        _any(r"exited with code (\d+) without a report"),
        "the process of the rank ended itself with code {0}, without an exception (os._exit, or native code)",
        "see the end of the named rank's log",
    ),
    Pattern(
        "killed",
        _any(r"was killed by SIGKILL"),
        "the rank was killed from outside: by the kernel when memory runs out, or by a user or program",
        "run `dmesg -T | grep -i oom` on that host; " + HOST_MEMORY_FIX,
    ),
    Pattern(
        "crashed",
        _any(r"was killed by (SIG(?:SEGV|BUS|ILL|ABRT|FPE))", r"(Segmentation fault)", r"(Bus error)"),
        "native code crashed ({0})",
        "check C libraries and the size of shared memory; PYTHONFAULTHANDLER=1 in launch.env shows the stack",
    ),
)

#: Slurm's reasons for a pending job: meaning, and how to shorten the wait.
WAITING = {
    "Priority": (
        "jobs of higher priority run first",
        "wait, or request fewer nodes or a shorter cluster.time_limit_min",
    ),
    "Resources": ("no suitable nodes are free", "wait, or request fewer nodes or a shorter cluster.time_limit_min"),
    "BeginTime": ("its requested start time is in the future, or Slurm has just requeued it", "wait"),
    "Dependency": ("it waits for another job", "wait; `scontrol show job` names it"),
    "DependencyNeverSatisfied": (
        "the job that it depends on has failed, so it never starts",
        "cancel it and submit it again",
    ),
    "JobHeldUser": ("the user holds it", "`scontrol release` releases it"),
    "JobHeldAdmin": ("an administrator holds it", "contact the administrators"),
    "PartitionTimeLimit": (
        "it requests more time than the partition allows",
        "reduce cluster.time_limit_min and submit again",
    ),
    "PartitionNodeLimit": ("it requests more nodes than the partition allows", "reduce cluster.nodes and submit again"),
    "PartitionDown": ("the partition is down", "wait, or set another cluster.partition"),
    "ReqNodeNotAvail": ("requested nodes are down or reserved", "wait, or relax cluster.constraint or cluster.exclude"),
    "JobArrayTaskLimit": ("the sweep's limit of parallel cells is reached", "wait, or raise --array-parallelism"),
    "launch_failed_requeued_held": ("its start failed on a node, so Slurm holds it", "`scontrol release` retries it"),
}


def first_match(lines: Iterable[str]) -> tuple[Pattern, int] | None:
    """Return the first pattern that any line matches, and the index of the first such line."""
    best: tuple[int, int] | None = None
    for number, line in enumerate(lines):
        for index, pattern in enumerate(PATTERNS[: best[0] if best else None]):
            if pattern.texts.search(line):
                best = (index, number)
                break
    return (PATTERNS[best[0]], best[1]) if best else None


def users_frame(trace: Sequence[str]) -> re.Match[str] | None:
    """Return the innermost frame of a traceback in the user's code, with groups `file` and `line`."""
    found = None
    for line in trace:
        frame = _FRAME.search(line)
        if frame is not None and not _LIBRARY.search(frame["file"]):
            # A copy of hpcdist, as an environment of ranks has it, contains the same modules.
            package, _, module = frame["file"].rpartition("/hpcdist/")
            found = found if package and (_PACKAGE / module).is_file() else frame
    return found


def cause_of(pattern: Pattern, line: str) -> str:
    """Return a pattern's cause with the name that the line contains."""
    match = pattern.texts.search(line)
    named = next((group for group in match.groups() if group), None) if match else None
    return pattern.cause.format(named or "").rstrip(": ")


def quote(line: str) -> str:
    """Return a line with single spaces, cut to `QUOTE_CHARS`."""
    text = " ".join(line.split())
    return text if len(text) <= QUOTE_CHARS else text[: QUOTE_CHARS - 1] + "…"
