"""Requeue a heterogeneous job completely when the node of its first component fails. Runs on another component's node.

After such a failure Slurm requeues the first component and leaves the others running until their time limit, although
the job can only start as a whole. A second `scontrol requeue` fails because the job is pending, but requeues the other
components as well (both seen with 22.05). The supervisor cannot request it, because it ran on the failed node.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from hpcdist.errors import HpcdistError
from hpcdist.slurm import client

#: Low load for a controller, and short compared with the minutes after which it declares a node down.
POLL_EVERY_S = 20.0


def is_partly_requeued(records: Sequence[Mapping[str, str]]) -> bool:
    """Return whether the first component is pending while another one runs."""
    states = [facts.get("JobState") for facts in records]
    return bool(states) and states[0] == "PENDING" and "RUNNING" in states[1:]


def main() -> None:
    """Poll a job, given by its id as argument, until Slurm ends this step with the job."""
    (job_id,) = sys.argv[1:]
    while True:
        time.sleep(POLL_EVERY_S)
        try:
            if is_partly_requeued(client.job_records(job_id)):
                print(f"the first component of job {job_id} was requeued alone: requeueing the others", flush=True)
                client.requeue_job(job_id)
        except HpcdistError as error:
            print(error, flush=True)  # tried again at the next poll


if __name__ == "__main__":
    main()
