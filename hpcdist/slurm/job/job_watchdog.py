"""Requeue a job whose batch host fails, where Slurm does not do so. Runs on a node other than the batch host.

- Of a heterogeneous job Slurm requeues the first component and leaves the others running until their time limit,
  although the job can only start as a whole. A second `scontrol requeue` fails because the job is pending, but requeues
  the other components as well.
- From a job with `--no-kill` Slurm removes the batch host and leaves the job running without its batch step.

Both were seen with 22.05. The supervisor cannot request the requeue, because it ran on the failed node.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from hpcdist.errors import HpcdistError
from hpcdist.slurm import client
from hpcdist.slurm.command_output import parse_text
from hpcdist.slurm.nodelist import expand

#: Low load for a controller, and short compared with the minutes after which it declares a node down.
POLL_EVERY_S = 20.0


def is_partly_requeued(records: Sequence[Mapping[str, str]]) -> bool:
    """Return whether the first component is pending while another one runs."""
    states = [facts.get("JobState") for facts in records]
    return bool(states) and states[0] == "PENDING" and "RUNNING" in states[1:]


def has_lost_batch_host(records: Sequence[Mapping[str, str]]) -> bool:
    """Return whether the job runs without its batch host."""
    if not records or records[0].get("JobState") != "RUNNING":
        return False
    host, nodes = parse_text(records[0].get("BatchHost")), parse_text(records[0].get("NodeList"))
    return bool(host and nodes) and host not in expand(nodes)


def main() -> None:
    """Poll a job, given by its id as argument, until Slurm ends this step with the job."""
    (job_id,) = sys.argv[1:]
    while True:
        time.sleep(POLL_EVERY_S)
        try:
            records = client.job_records(job_id)
            if is_partly_requeued(records):
                print(f"the first component of job {job_id} was requeued alone: requeueing the others", flush=True)
                client.requeue_job(job_id)
            if has_lost_batch_host(records):
                print(f"job {job_id} has lost its batch host: requeueing it", flush=True)
                client.requeue_job(job_id)
        except HpcdistError as error:
            print(error, flush=True)  # tried again at the next poll


if __name__ == "__main__":
    main()
