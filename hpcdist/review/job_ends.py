"""The ends of jobs by Slurm, with causes and fixes."""

from hpcdist.run.job_record import JobStart

LESS_MEMORY = "use less: fewer data.num_workers, smaller data.batch_size, fewer ranks per node"
HOST_MEMORY_FIX = f"request more (cluster.mem), or {LESS_MEMORY}"
NODE_FIX = (
    "cluster.exclude avoids the node; if the run has ended, `hpcdist resume` continues from the newest checkpoint"
)
TIME_FIX = (
    "raise cluster.time_limit_min, or cluster.signal_lead_s so that the ranks can save; `hpcdist resume` continues"
)
#: Causes and fixes by the state with which Slurm ends a job; UNCREATED_OUTPUT is FAILED with signal 53.
JOB_ENDS = {
    "UNCREATED_OUTPUT": (
        "Slurm could not create the job's output file, so that the job ended before its first line",
        "runs_dir must exist on the node under the same path, and be writable there (`srun touch RUNS_DIR/x`)",
    ),
    "OUT_OF_MEMORY": ("the job used more memory than it requested", HOST_MEMORY_FIX),
    "TIMEOUT": ("the job reached its time limit", TIME_FIX),
    "DEADLINE": ("the job reached its deadline", TIME_FIX),
    "NODE_FAIL": ("a node failed", NODE_FIX),
    "BOOT_FAIL": ("a node did not boot", NODE_FIX),
    "PREEMPTED": ("a job of higher priority preempted this one", ""),
    "CANCELLED": (
        "the job was cancelled (scancel, by the user or an administrator)",
        "`hpcdist resume` submits it again",
    ),
}


def cause_by_slurm(start: JobStart | None) -> str:
    """Return why Slurm has ended a start of the job; empty if it has not, or a user has cancelled the job."""
    if start is None or start.state not in JOB_ENDS or start.state == "CANCELLED":
        return ""
    cause, _ = JOB_ENDS[start.state]
    if start.state == "NODE_FAIL" and start.failed_nodes:
        noun = "nodes" if "," in start.failed_nodes else "node"
        cause = f"{noun} {start.failed_nodes.replace(',', ', ')} failed"
    return f"{cause} (Slurm: {start.state})"
