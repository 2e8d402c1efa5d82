"""CPU time of forking a rank from a process that has imported torch, and the memory of that process.

    python benchmarks/fork_cost.py [--rounds 15] [--json]

The CPU time is what processes forked in advance could save at a restart. It depends little on other load. The modules
are those that the parent process of ddp imports (`hpcdist/rank/parent.py`).
"""

from __future__ import annotations

import gc
import json
import os
import resource
from pathlib import Path

from harness import argument_parser, median

from hpcdist.rank import parent
from hpcdist.rank.processes import RANK_MODULE


def cpu_s() -> float:
    """Return the CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def forking_s() -> float:
    """Fork a process that ends at once; return the CPU seconds of this one."""
    before = cpu_s()
    if (pid := os.fork()) == 0:
        os._exit(0)
    after = cpu_s()
    os.waitpid(pid, 0)
    return after - before


def memory_mb(field: str) -> float:
    """Return a value of this process from smaps_rollup, in MB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    arguments = argument_parser(__doc__, rounds=15).parse_args()
    gc.disable()
    for name in ("torch", RANK_MODULE, *parent.TRAINER_MODULES, "hpcdist.trainers.ddp.train"):
        __import__(name)
    gc.freeze()
    row = {
        "fork_ms": 1000 * median([forking_s() for _ in range(arguments.rounds)]),
        "pss_mb": memory_mb("Pss"),
        "private_mb": memory_mb("Private_Dirty"),
    }
    print(f"CPU time of a fork: {row['fork_ms']:.1f} ms (median of {arguments.rounds})")
    print(f"memory of the parent: {row['pss_mb']:.0f} MB (PSS), of which {row['private_mb']:.0f} MB are its own")
    if arguments.json:
        print(json.dumps({"benchmark": "fork_cost", "rounds": arguments.rounds, "rows": {"parent": row}}))


if __name__ == "__main__":
    main()
