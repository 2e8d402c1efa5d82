"""`python -m hpcdist.job.submitit_entry -u -m submitit.core._submit FOLDER`: the interpreter for submitit.

submitit imports NumPy before it loads a pickle, which might contain arrays. The pickle here holds the name of a
function and a path, and importing NumPy takes as long as all other imports of the batch step.
"""

import sys
import time

from hpcdist.errors import HpcdistError


def main() -> None:
    """Run submitit, with NumPy hidden while submitit tries to import it."""
    sys.modules["numpy"] = None  # type: ignore[assignment]
    from submitit.core.submission import submitit_main

    del sys.modules["numpy"]
    sys.argv = [sys.argv[0], sys.argv[-1]]
    submitit_main()


# The function that submitit calls in a job; `submit`, which needs its name only, does not import the supervisor.

#: Minimum time between the request for a requeue and the end of the batch step. A job that Slurm kills and starts
#: again within one second fails: slurmd refuses its new credential ("Job credential revoked"). The job cannot start
#: before its batch step has ended. Slurm delays most requeued jobs by 120 s, but `scontrol update StartTime=now` ends
#: that.
CREDENTIAL_S = 2.0


def supervise_in_job(run_dir: str) -> str:
    """Supervise a run from inside its job and return a sentence on its state.

    It is called again, with the same arguments, each time that Slurm restarts the job. Raises HpcdistError if another
    job holds the run or the run failed: then Slurm marks the job as failed, and dependent jobs see it.
    """
    from hpcdist.job import batch_step

    state = batch_step.supervise_job(run_dir)
    if state.status == "failed":
        raise HpcdistError(state.reason)
    if state.status == "queued":
        time.sleep(CREDENTIAL_S)
    return state.sentence


if __name__ == "__main__":
    main()
