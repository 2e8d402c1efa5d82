"""The known failures that `hpcdist explain` recognises in logs and error messages."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hpcdist.review.job_ends import HOST_MEMORY_FIX, JOB_ENDS, LESS_MEMORY, NODE_FIX
from hpcdist.run.device_memory import OUT_OF_MEMORY_BESIDE_TORCH


@dataclass(frozen=True)
class Pattern:
    """A known failure, with the texts by which it is recognised in logs and error messages."""

    name: str
    texts: str  #: a regular expression
    cause: str  #: `{0}` is replaced by the first matched group of `texts`
    fix: str
    is_fault: bool = False  #: whether it comes from a node, device or connection, so that a restart may help

    def cause_in(self, line: str) -> str:
        """Return the cause with the names that a line has, if the failure is recognised in it."""
        match = re.search(self.texts, line)
        named = ""
        if match is not None:
            named = next(filter(None, match.groups()), "")
        return self.cause.format(named).rstrip(": ")


HANG_FIX = "see the ranks' stack traces; if a step may take that long, raise the named timeout"

#: Lacks of memory that the kernel's counters prove (`host/cgroups.py`).
MEMORY_PATTERNS = (
    Pattern(
        "memory-of-job",
        r"out of memory, with a limit of \S+ MiB for the (Slurm (?:step|job))",
        "the processes of the {0} on a node needed more memory than it has there",
        HOST_MEMORY_FIX,
    ),
    Pattern(
        "memory-of-container",
        r"out of memory, with a limit of \S+ MiB for the container",
        "the processes of the container needed more memory than its limit",
        f"start the container with a higher limit (`docker run --memory`), or {LESS_MEMORY}",
    ),
    Pattern(
        "memory-of-group",
        r"out of memory, with a limit of \S+ MiB for the control group",
        "the processes needed more memory than the system allows this login or service",
        f"raise the limit (`systemctl show --property=MemoryMax user-$(id -u).slice` shows it), or {LESS_MEMORY}",
    ),
    Pattern(
        "memory-of-machine",
        r"out of memory, since all \S+ MiB of the machine were in use",
        "the machine's memory is exhausted, by this run or by other programs on it",
        f"end other programs on the machine, use one with more memory, or {LESS_MEMORY}",
    ),
)

#: Ordered: the first match is reported, so causes come before their consequences.
PATTERNS = (
    *MEMORY_PATTERNS,
    Pattern(
        "cuda-out-of-memory",
        rf"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|{OUT_OF_MEMORY_BESIDE_TORCH}",
        "the GPU's memory is full",
        "reduce data.batch_size, or set data.global_batch_size and launch.fit_batch=true, which halves its parts until"
        " they fit; else precision.dtype=bf16, or GPUs with more memory (cluster.constraint)",
    ),
    Pattern(
        "out-of-memory",
        r"oom[-_]kill|killed by the kernel: out of memory|Out Of Memory|Out of memory: Killed process"
        r"|exceeded (?:(?:step|job) )?memory limit|Exceeded job memory limit|can't allocate memory"
        r"|Cannot allocate memory|MemoryError\b|DataLoader worker .*killed by signal: Killed|OUT_OF_MEMORY",
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
        "duplicate-gpu",
        r"Duplicate GPU detected",
        "two ranks use one GPU, which NCCL refuses",
        "give each rank a GPU of its own: fewer ranks (launch.num_ranks), more GPUs (cluster.gpus_per_node),"
        " or torch.cuda.set_device(LOCAL_RANK) in a script",
    ),
    Pattern(
        "no-driver",
        r"Found no NVIDIA driver on your system|no CUDA-capable device is detected|No CUDA GPUs",
        "the ranks see no GPU",
        "request GPUs (cluster.gpus_per_node), or set launch.device=cpu",
    ),
    Pattern(
        "gpu-lost",
        r"CUDA-capable device\(s\) is/are busy or unavailable|GPU is lost|GPU has fallen off the bus"
        r"|uncorrectable (?:ECC|NVLink) error",
        "a GPU of the named rank is lost, or another program uses it exclusively",
        f"check the node (`nvidia-smi`, `dmesg | grep Xid`); {NODE_FIX}",
        is_fault=True,
    ),
    Pattern(
        "port-taken",
        r"is not rank 0 of this attempt|does another program listen on this port|rank 0 cannot listen on",
        "another program uses rank 0's port",
        "`hpcdist resume`: each attempt uses another port; HPCDIST_MASTER_PORT in launch.env sets one",
        is_fault=True,
    ),
    Pattern(
        "port-of-the-code",
        r"EADDRINUSE|[Aa]ddress already in use",
        "the code listens on a port that another process uses, such as another rank with the same code",
        "if the script starts its own ranks, start it once: launch.num_ranks=1, on Slurm cluster.nodes=1 and"
        " cluster.tasks_per_node=1; else use the port in MASTER_PORT, which each attempt changes, not a fixed one",
        is_fault=True,
    ),
    Pattern(
        "node-failure",
        r"Node failure on (\S+)|NODE FAILURE|; lost (\S+)",
        "a node failed: {0}",
        NODE_FIX,
        is_fault=True,
    ),
    Pattern("time-limit", r"DUE TO TIME LIMIT", *JOB_ENDS["TIMEOUT"]),
    Pattern(
        "preempted",
        r"DUE TO PREEMPTION",
        "a job of higher priority took the nodes",
        "none if Slurm requeues the job; otherwise `hpcdist resume` goes on from the newest checkpoint",
    ),
    Pattern(
        "no-program",
        r"(?:execve\(\)|exec): (\S+): (?:No such file or directory|not found)",
        "the node does not find {0}",
        "the environment, the image and runs_dir must be visible on each node under the same path; a program without a"
        " path must be on the PATH that the job has (cluster.setup)",
    ),
    Pattern(
        "step-not-started",
        r"Unable to create step for job \d+: Requested nodes are busy|step creation (?:temporarily|still) disabled"
        r"|step \S+ \(attempt-\d+\) does not end",
        "Slurm did not start the ranks: another step holds the job's resources, or a node does not launch tasks",
        "`squeue --steps --jobs=JOB` shows the job's steps; launch.init_timeout_s gives more time",
    ),
    Pattern(
        "not-started",
        r"(?:no rank|rank \d+ .*) was (?:not )?started .*(?:within launch\.init_timeout_s|at all)",
        "the ranks were not started in time: a node is busy, or reads torch slowly; a node of Slurm may also not launch"
        " tasks",
        "launch.init_timeout_s gives more time; in a job, `squeue --steps --jobs=JOB` shows whether the step has begun",
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
        is_fault=True,
    ),
    Pattern(
        "collective-timeout",
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for \w+ operation|Socket Timeout"
        r"|collective operation.* timed out|wait timeout after \d+ms",
        "a collective operation timed out: a rank did not take part",
        "inspect the missing rank: it hangs, or its code called other collectives (py-spy, NCCL_DEBUG=INFO)",
        is_fault=True,
    ),
    Pattern(
        "unreachable",
        r"cannot reach the master at|could not connect to the other ranks at|The client socket has timed out",
        "the ranks could not connect to each other",
        "check the network between the nodes (firewall, GLOO_SOCKET_IFNAME); launch.init_timeout_s gives more time",
        is_fault=True,
    ),
    Pattern(
        "peer-lost",
        r"Connection (?:closed|reset) by peer|Broken pipe|nccl(?:Remote|System)Error",
        "the ranks lost their connection, and none of them reported another cause",
        "see the ranks' logs, and check the network between the nodes",
        is_fault=True,
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


def first_match(lines: Iterable[str]) -> tuple[Pattern, int] | None:
    """Return the first pattern that any line matches, and the index of that line."""
    searched = list(lines)
    for pattern in PATTERNS:
        search = re.compile(pattern.texts).search
        for index, line in enumerate(searched):
            if search(line):
                return pattern, index
    return None
