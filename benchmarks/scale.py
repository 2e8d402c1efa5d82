"""Cost of 4,096 ranks on 512 nodes for the supervisor and for the shared file system, by simulation.

    python benchmarks/scale.py [--ranks 64,512,4096] [--seconds 20] [--json]

Supervisor, watch, srun step, lease, heartbeats, journals, rank derivation and batch script are real. srun is a stub
that reports as the parents of the ranks do, and the ranks are threads of one process that write the files of ranks. The
shipper is left out. At the end the last rank fails and all others report a lost peer; the supervisor must name the last
rank.

Calls that reach the file system are counted in both processes: open, stat, list, rename, remove and write.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import argument_parser
from scale_simulation import PROCESSES, RANKS_PER_NODE, make_config, nodelist, run_of, simulate

from hpcdist.config.slurm_notation import expand
from hpcdist.config.topology import Topology
from hpcdist.host.json_files import write_json
from hpcdist.job.srun import ended_tasks
from hpcdist.job.submit import render
from hpcdist.supervisor.restart_policy import first_failure

#: Exponent up to which a cost counts as linear. N log N has 1.17 from 64 to 4,096 ranks, and a loop over data that
#: outgrow the processor's cache looks alike; a nested loop has 2.
LINEAR_UP_TO = 1.2
#: Shortest reading of CPU time: on a virtual machine, this clock may stand still during a call of microseconds.
READING_S = 1e-3
MIN_READINGS = 7


def seconds_of(call: Callable[[], object], at_least_s: float = 0.3) -> float:
    """Return the CPU seconds of a call, the minimum of many readings, which depends least on other load."""
    num_calls = 1
    seconds = cpu_seconds(call, num_calls)
    while seconds < READING_S:
        num_calls *= 2
        seconds = cpu_seconds(call, num_calls)
    num_readings = max(MIN_READINGS, math.ceil(at_least_s / seconds))
    return min(cpu_seconds(call, num_calls) for _ in range(num_readings)) / num_calls


def cpu_seconds(call: Callable[[], object], num_calls: int) -> float:
    """Return the CPU seconds of a number of calls."""
    began = time.process_time()
    for _ in range(num_calls):
        call()
    return time.process_time() - began


def function_costs(num_ranks: int, root: Path) -> dict[str, float]:
    """Return the seconds of the functions that run once, or once per rank, in a run of this size."""
    config = make_config(num_ranks, root)
    num_nodes = config.cluster.nodes
    run = run_of(config)
    middle = num_ranks // 2
    env = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(middle),
        "SLURM_LOCALID": str(middle % RANKS_PER_NODE),
        "SLURM_NODEID": str(middle // RANKS_PER_NODE),
        "SLURM_STEP_NUM_TASKS": str(num_ranks),
        "SLURM_STEP_NODELIST": nodelist(num_nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"{RANKS_PER_NODE}(x{num_nodes})",
    }
    assert Topology.from_env(env).world_size == num_ranks
    scattered = "n[" + ",".join(str(2 * node) for node in range(num_nodes)) + "]"
    messages = "".join(
        f"srun: error: n{rank // 8}: task {rank}: Exited with exit code 1\n" for rank in range(num_ranks)
    )
    ends = ended_tasks(messages)
    lost = {"outcome": "failed", "host": "n", "step": 1, "error": "e", "traceback": [], "peer_lost": True}
    outcomes = dict.fromkeys(range(num_ranks), lost)
    exits = {rank: code for rank, (_, code) in ends.items()}
    return {
        "rank derivation, per rank": seconds_of(lambda: Topology.from_env(env)),
        "nodelist, a range": seconds_of(lambda: expand(nodelist(num_nodes))),
        "nodelist, scattered": seconds_of(lambda: expand(scattered)),
        "batch script and srun line": seconds_of(lambda: render(config, run)),
        "parsing srun's messages": seconds_of(lambda: ended_tasks(messages)),
        "finding the first failure": seconds_of(lambda: first_failure(exits, outcomes, lambda rank: None, str)),
    }


def lease_ms(root: Path) -> float:
    target = root / "lease"
    return 1e3 * seconds_of(lambda: write_json(target, {"host": "n1", "pid": 1, "renewed": time.time()}))


def exponent(times: dict[int, float]) -> float:
    """Return the exponent by which a time grows from the smallest to the largest number of ranks: 1 is linear."""
    low, high = min(times), max(times)
    return math.log(times[high] / times[low]) / math.log(high / low) if low != high else 0.0


def log_exponent(sizes: list[int]) -> float:
    """Return the exponent of N log N over these sizes."""
    return exponent({size: size * math.log(size) for size in sizes})


def show(sizes: list[int], runs: dict[int, dict[str, Any]], costs: dict[int, dict[str, float]]) -> dict[str, Any]:
    """Print the tables and return the figures for JSON."""
    kinds = ("open", "stat", "list", "rename", "remove", "write")
    print(
        f"{'ranks':>8}{'nodes':>7}  {'CPU %':>6}  calls/s: " + "".join(f"{kind:>8}" for kind in kinds) + f"{'all':>8}"
    )
    figures: dict[str, Any] = {}
    for size in sizes:
        sums = {}
        for process in PROCESSES:
            rates = runs[size][process]
            sums[process] = sum(rates.get(kind, 0.0) for kind in kinds)
            cpu = f"{100 * rates['cpu']:6.2f}" if process == "supervisor" else " " * 6
            row = "".join(f"{rates.get(kind, 0.0):8.1f}" for kind in kinds)
            print(f"{size:8}{size // RANKS_PER_NODE:7}  {cpu}  {process:>10}{row[1:]}{sums[process]:8.1f}")
        figures[str(size)] = {
            "cpu_percent": 100 * runs[size]["supervisor"]["cpu"],
            "calls_per_s": sum(sums.values()),
            "end_cpu_s": runs[size]["end_cpu_s"],
            "decided_s": runs[size]["decided_s"],
        }
    print("\nafter the failure of all ranks: from the end of srun to the end of the supervisor")
    for size in sizes:
        print(f"{size:8} ranks  {runs[size]['decided_s']:6.2f} s, {runs[size]['end_cpu_s']:6.2f} s of CPU")
    print(f"\n{'CPU ms':28}" + "".join(f"{size:>10}" for size in sizes) + "    growth exponent")
    exponents = {}
    for name in costs[sizes[0]]:
        exponents[name] = exponent({size: costs[size][name] for size in sizes})
        row = "".join(f"{1e3 * costs[size][name]:10.3f}" for size in sizes)
        print(f"{name:28}{row}    {exponents[name]:.2f}")
    print(f"1 is linear; up to {LINEAR_UP_TO:g} counts as such (N log N: {log_exponent(sizes):.2f})")
    return {"sizes": figures, "largest_power": max(exponents.values()), "powers": exponents}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", default="64,512,4096")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of the measurement")
    parser.add_argument("--role", choices=PROCESSES, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        PROCESSES[arguments.role](arguments.root, int(arguments.ranks), arguments.seconds)
        return
    sizes = [int(text) for text in arguments.ranks.split(",")]
    with tempfile.TemporaryDirectory(prefix="scale_") as name:
        costs = {size: function_costs(size, Path(name)) for size in sizes}
        renewal = lease_ms(Path(name))
    runs = {size: simulate(size, arguments.seconds) for size in sizes}
    figures = show(sizes, runs, costs)
    print(f"lease renewal, once in 10 s  {renewal:9.3f}")
    if arguments.json:
        print(json.dumps({"benchmark": "scale", "lease_ms": renewal, **figures}))


if __name__ == "__main__":
    main()
