"""What programs print when they fail in a known way, and what to do about it. Data and pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

#: How much of a line is quoted.
QUOTE_CHARS = 160


@dataclass(frozen=True)
class Pattern:
    """One known failure."""

    name: str
    texts: re.Pattern[str]
    cause: str  #: `{0}` stands for the first group of `texts` that took part in the match
    fix: str


def _any(*texts: str) -> re.Pattern[str]:
    return re.compile("|".join(texts))


HOST_MEMORY_FIX = "ask for more (cluster.mem), or need less: smaller data.batch_size, fewer ranks per node"
NODE_FIX = "`hpcdist resume` goes on from the newest checkpoint; cluster.exclude keeps away from the node"
TIME_FIX = (
    "more cluster.time_limit_min, or more cluster.signal_lead_s so that the ranks can save; `hpcdist resume` goes on"
)
HANG_FIX = "the ranks' stacks show where they stand; if a step may take so long, raise the timeout that is named"

#: The first that matches counts: causes stand before what follows from them.
PATTERNS = (
    Pattern(
        "cuda-out-of-memory",
        _any(r"CUDA out of memory", r"torch\.(?:cuda\.)?OutOfMemoryError", r"CUDA error: out of memory"),
        "the GPU's memory is full",
        "smaller data.batch_size, precision.dtype=bf16, or GPUs with more memory (cluster.constraint)",
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
        "the host's memory, or what the job may use of it, is full",
        HOST_MEMORY_FIX,
    ),
    Pattern(
        "shared-memory",
        _any(r"DataLoader worker .*Bus error", r"insufficient shared memory", r"unable to (?:write|open).*/torch_\d+"),
        "shared memory (/dev/shm) is too small for the data loaders' workers",
        "data.num_workers=0, or a larger /dev/shm (a container's --shm-size or --ipc=host)",
    ),
    Pattern(
        "disk-full",
        _any(r"No space left on device", r"ENOSPC", r"Disk quota exceeded", r"unexpected pos \d+ vs \d+"),
        "a disk is full, or a quota is used up",
        "make room in the folder named there (`df -h`, `quota`), then `hpcdist resume`; the last checkpoint is whole",
    ),
    Pattern(
        "missing-module",
        _any(r"ModuleNotFoundError: No module named '([\w.]+)'", r"ImportError: cannot import name '(\w+)'"),
        "Python does not find {0} where the ranks run",
        "install it in the environment that the nodes use, or start the run from the folder that holds it",
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
        "a PyTorch built for an older CUDA (`pip install torch --index-url …/cuXYZ`), or nodes with a newer driver",
    ),
    Pattern(
        "no-driver",
        _any(r"Found no NVIDIA driver on your system", r"no CUDA-capable device is detected", r"No CUDA GPUs"),
        "the ranks see no GPU",
        "ask for GPUs (cluster.gpus_per_node), or launch.device=cpu",
    ),
    Pattern(
        "stranger-on-port",
        _any(r"is not rank 0 of this attempt", r"does another program listen on this port"),
        "another program answered on the port where the ranks meet",
        "`hpcdist resume`: each attempt takes another port; HPCDIST_MASTER_PORT in launch.env sets one",
    ),
    Pattern(
        "port-taken",
        _any(r"EADDRINUSE", r"[Aa]ddress already in use"),
        "another program has the port that rank 0 wants to listen on",
        "`hpcdist resume`: each attempt takes another port; HPCDIST_MASTER_PORT in launch.env sets one",
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
        "nothing where Slurm queues the job again; else `hpcdist resume` goes on from the newest checkpoint",
    ),
    Pattern(
        "not-started",
        _any(
            r"Unable to create step for job \d+: Requested nodes are busy",
            r"step creation (?:temporarily|still) disabled",
            r"(?:no rank|rank \d+ .*) was (?:not )?started .*(?:within launch\.init_timeout_s|at all)",
            r"step \S+ \(attempt-\d+\) does not end",
        ),
        "Slurm did not start the ranks: another step of the job holds what they need, or a node does not launch tasks",
        "`squeue --steps --jobs=JOB` shows the job's steps; launch.init_timeout_s gives more time",
    ),
    Pattern(
        "revoked",
        _any(r"Job credential revoked", r"launch failed requeued held", r"Unable to create step for job"),
        "Slurm could not start the job's processes on the node",
        "`hpcdist resume` submits it anew; if it comes again, cluster.exclude keeps away from the node",
    ),
    Pattern(
        "hang",
        _any(r"made no progress for launch\.hang_timeout_s", r"did not save and leave within launch\.stop_grace_s"),
        "the ranks stood still",
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
        "a rank waited in vain for another one in a collective operation",
        "look at the rank that did not come: it hangs, or took another path through the code (py-spy, NCCL_DEBUG=INFO)",
    ),
    Pattern(
        "unreachable",
        _any(
            r"cannot reach the master at",
            r"could not connect to the other ranks at",
            r"The client socket has timed out",
        ),
        "the ranks did not reach each other",
        "check the network between the nodes (firewall, GLOO_SOCKET_IFNAME); launch.init_timeout_s gives more time",
    ),
    Pattern(
        "peer-lost",
        _any(r"Connection (?:closed|reset) by peer", r"Broken pipe", r"nccl(?:Remote|System)Error"),
        "another rank died first, without a word",
        "look at the other ranks' logs and the node's system log; a rank that is killed is often short of memory",
    ),
    Pattern(
        "killed",
        _any(r"was killed by SIGKILL"),
        "something killed the rank from outside: most often the kernel, for want of memory",
        "`dmesg -T | grep -i oom` on that host tells; " + HOST_MEMORY_FIX,
    ),
    Pattern(
        "crashed",
        _any(r"was killed by (SIG(?:SEGV|BUS|ILL|ABRT|FPE))", r"(Segmentation fault)", r"(Bus error)"),
        "native code crashed ({0})",
        "suspect a library with C code, or too little shared memory; PYTHONFAULTHANDLER=1 in launch.env shows where",
    ),
)

#: Why a job waits, in Slurm's words: what that means, and what shortens it.
WAITING = {
    "Priority": (
        "jobs of higher priority come first",
        "wait, or ask for less: fewer nodes, a shorter cluster.time_limit_min",
    ),
    "Resources": ("no nodes are free that fit", "wait, or ask for less: fewer nodes, a shorter cluster.time_limit_min"),
    "BeginTime": ("it may not start before the time that was asked for, or was requeued a moment ago", "wait"),
    "Dependency": ("it waits for another job", "wait; `scontrol show job` names the other one"),
    "DependencyNeverSatisfied": ("the job that it depends on has failed: it never starts", "cancel it, submit it anew"),
    "JobHeldUser": ("someone holds it", "`scontrol release` lets it go"),
    "JobHeldAdmin": ("the cluster's staff holds it", "ask them"),
    "PartitionTimeLimit": (
        "it asks for more time than the partition allows",
        "smaller cluster.time_limit_min; submit anew",
    ),
    "PartitionNodeLimit": ("it asks for more nodes than the partition allows", "smaller cluster.nodes; submit anew"),
    "PartitionDown": ("the partition is down", "wait, or another cluster.partition"),
    "ReqNodeNotAvail": ("nodes that it asks for are down or reserved", "wait, or loosen cluster.constraint or exclude"),
    "JobArrayTaskLimit": ("as many cells of its sweep run as may at a time", "wait, or more --array-parallelism"),
    "launch_failed_requeued_held": ("its start failed on a node; Slurm holds it", "`scontrol release` tries again"),
}


def first_match(lines: Iterable[str]) -> tuple[Pattern, int] | None:
    """The foremost pattern that some line matches, and the number of the first such line (from 0)."""
    best: tuple[int, int] | None = None
    for number, line in enumerate(lines):
        for index, pattern in enumerate(PATTERNS[: best[0] if best else None]):
            if pattern.texts.search(line):
                best = (index, number)
                break
    return (PATTERNS[best[0]], best[1]) if best else None


def cause_of(pattern: Pattern, line: str) -> str:
    """The cause with the names that the line gives."""
    match = pattern.texts.search(line)
    named = next((group for group in match.groups() if group), None) if match else None
    return pattern.cause.format(named or "").rstrip(": ")


def quote(line: str) -> str:
    """A line as it can be quoted: no longer than fits."""
    text = " ".join(line.split())
    return text if len(text) <= QUOTE_CHARS else text[: QUOTE_CHARS - 1] + "…"
