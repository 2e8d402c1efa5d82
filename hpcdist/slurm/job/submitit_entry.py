"""`python -m hpcdist.slurm.job.submitit_entry -u -m submitit.core._submit FOLDER`: the interpreter for submitit.

submitit imports NumPy before it opens a pickle, in case that there is an array in it. Ours holds the name of a function
and a path, and NumPy's import takes as long as all others of the batch step.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Be submitit on a machine that seems to have no NumPy, as long as it looks for it."""
    sys.modules["numpy"] = None  # type: ignore[assignment]
    from submitit.core.submission import submitit_main

    del sys.modules["numpy"]
    sys.argv = [sys.argv[0], sys.argv[-1]]
    submitit_main()


if __name__ == "__main__":
    main()
