"""Stands on a node of a further component of a heterogeneous job, in case that the first one's node dies.

Slurm queues the first component again then, and leaves the others running, though the job can only start as a whole:
nothing would happen until their time limit. Asked to requeue the job once more it answers that it is pending, and
queues the others as well (both seen with 22.05). The supervisor, who asks in all other cases, has died with its node.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from hpcdist.errors import HpcdistError
from hpcdist.slurm import client

#: Seldom enough for a controller, and soon after it has given a node up, which takes it minutes.
LOOK_EVERY_S = 20.0


def is_torn(records: Sequence[Mapping[str, str]]) -> bool:
    """Whether the first component waits in the queue while another one runs."""
    states = [facts.get("JobState") for facts in records]
    return bool(states) and states[0] == "PENDING" and "RUNNING" in states[1:]


def main() -> None:
    """Watch the job whose id is the one argument, until Slurm ends this with the rest of the job."""
    (job_id,) = sys.argv[1:]
    while True:
        time.sleep(LOOK_EVERY_S)  # nothing tells: it is a question to the controller
        try:
            if is_torn(client.job_records(job_id)):
                print(f"the first component of job {job_id} is queued again: the others follow", flush=True)
                client.requeue_job(job_id)
        except HpcdistError as error:
            print(error, flush=True)  # a controller that is away for a while


if __name__ == "__main__":
    main()
