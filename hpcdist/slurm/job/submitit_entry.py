"""`python -m hpcdist.slurm.job.submitit_entry -u -m submitit.core._submit FOLDER`: the interpreter for submitit.

submitit imports NumPy before it loads a pickle, which might contain arrays. The pickle here holds the name of a
function and a path, and importing NumPy takes as long as all other imports of the batch step.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run submitit, with NumPy hidden while submitit tries to import it."""
    sys.modules["numpy"] = None  # type: ignore[assignment]
    from submitit.core.submission import submitit_main

    del sys.modules["numpy"]
    sys.argv = [sys.argv[0], sys.argv[-1]]
    submitit_main()


# The function that submitit calls in a job; `submit`, which needs its name only, does not import the supervisor.


def supervise_in_job(run_dir: str) -> str:
    """Supervise a run from inside its job and return its final status; see `batch_step.supervise_in_job`."""
    from hpcdist.slurm.job import batch_step

    return batch_step.supervise_in_job(run_dir)


if __name__ == "__main__":
    main()
