"""Seconds from SIGKILL of a rank to the next completed step, compared with `torchrun --max-restarts`.

    python benchmarks/recovery.py [--rounds 5] [--kills 4] [--keep FILE] [--json]

Two gloo ranks train a model of 10 MB (2.6 million parameters, with Adam) and save a checkpoint every 20 steps. Rank 1
and rank 0 are killed in turn, each time some steps after a new checkpoint. The time ends with the first step that rank
0 completes after the restart; the split is that of the slowest rank:

    processes    detection of the failure, end of the other rank, start of the new processes
    train()      import of torch, rendezvous
    build        data, model and DistributedDataParallel
    restore      reading of the checkpoint
    step         the first step

`ended` is the part of `processes` until hpcdist's supervisor has ended the attempt. The contenders alternate, each with
several kills per round; the result of a round is the median of its kills, the ratio is computed within each round, and
the results are medians. With `--keep` every round is written to a file, and a repeated command continues after it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from baselines.fault_task import Task
from fault_runs import NUM_RANKS, Mark, Running, data_settings, started
from harness import argument_parser, median, median_ratio

CONTENDERS = ("torchrun, torch.save", "hpcdist")
SAVE_EVERY = 20
#: Steps after a restart or the start before the next kill; more than SAVE_EVERY, so that a new checkpoint is on disk.
STEPS_BETWEEN = 30
LIMIT_S = 900.0
PARTS = ("processes", "train()", "build", "restore", "step")


def created(pid: int) -> float:
    """Return the Unix time at which a process was created, with a resolution of 10 ms."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def since(marks: Sequence[Mark], event: str, pids: set[int]) -> list[Mark]:
    return [mark for mark in marks if mark.event == event and mark.pid in pids]


def kill_and_measure(running: Running, rank: int) -> dict[str, float]:
    """Kill a rank; return the seconds of each part and of the whole recovery."""
    began = time.time()
    os.kill(running.reader.newest_ranks()[rank], signal.SIGKILL)

    def new_ranks(marks: Sequence[Mark]) -> set[int]:
        # By rank, so that the newest processes count if a restart has failed.
        newest = {mark.rank: mark.pid for mark in marks if mark.event == "entered" and mark.time > began}
        return set(newest.values())

    def recovered(marks: Sequence[Mark]) -> bool:
        return any(mark.rank == 0 for mark in since(marks, "step", new_ranks(marks)))

    if not running.wait_for(recovered, LIMIT_S):
        sys.exit(f"no step within {LIMIT_S:g} s after the death of a rank:\n{running.log.read_text()[-4000:]}")
    marks = running.reader.marks
    pids = new_ranks(marks)
    ends = [max(began, *map(created, pids))]
    for event in ("entered", "built", "restored"):
        ends.append(max(mark.time for mark in since(marks, event, pids)))
    first_step = min(mark.time for mark in since(marks, "step", pids) if mark.rank == 0)
    # The other rank may still write its mark when rank 0 has completed the step.
    ends = [min(end, first_step) for end in ends] + [first_step]
    seconds = dict(
        zip(PARTS, (after - before for before, after in zip([began, *ends], ends, strict=False)), strict=True)
    )
    return {**seconds, "ended": ended_of_attempt(running) - began, "total": first_step - began}


def ended_of_attempt(running: Running) -> float:
    """Return when hpcdist's supervisor had ended the last failed attempt; NaN for torchrun."""
    found = sorted(Path(running.task.folder).glob("runs/*/*/attempts/*/times.json"))
    ends = [json.loads(path.read_text())["ended"] for path in found]
    return max((end for end in ends if end is not None), default=float("nan"))


def measure_round(name: str, num_kills: int) -> dict[str, float]:
    """Start a contender and kill its ranks; return the medians."""
    folder = Path(tempfile.mkdtemp(prefix="recovery_"))
    task = Task(folder=str(folder), model="mlp", steps=10**6, save_every=SAVE_EVERY, **data_settings())
    measured: list[dict[str, float]] = []
    try:
        with started(name, task) as running:
            for number in range(num_kills):
                first = restored_at(running)
                if not running.wait_for(partial(has_reached, first + STEPS_BETWEEN), LIMIT_S):
                    sys.exit(f"{name}: {STEPS_BETWEEN} steps took more than {LIMIT_S:g} s")
                measured.append(kill_and_measure(running, (number + 1) % NUM_RANKS))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {part: median([one[part] for one in measured]) for part in measured[0]}


def restored_at(running: Running) -> int:
    """Return the step at which the newest processes have begun."""
    return next((mark.step for mark in reversed(running.reader.update()) if mark.event == "restored"), 0)


def steps_done(marks: Sequence[Mark]) -> int:
    return next((mark.step for mark in reversed(marks) if mark.event == "step" and mark.rank == 0), 0)


def has_reached(step: int, marks: Sequence[Mark]) -> bool:
    return steps_done(marks) >= step


def measure(rounds: int, num_kills: int, keep: Path | None) -> dict[str, list[dict[str, float]]]:
    """Measure the rounds that `keep` does not hold; return the results by contender."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for line in keep.read_text().splitlines() if keep is not None and keep.exists() else []:
        kept: dict[str, Any] = json.loads(line)
        results[kept["contender"]].append(kept["parts"])
    for number in range(rounds):
        for name in CONTENDERS:
            if len(results[name]) > number:
                continue
            load = os.getloadavg()[0]
            parts = measure_round(name, num_kills)
            results[name].append(parts)
            shown = "  ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items())
            print(f"round {number + 1}, {name}, load {load:.1f}: {shown}", file=sys.stderr, flush=True)
            if keep is not None:
                with open(keep, "a") as file:
                    file.write(json.dumps({"contender": name, "load": load, "parts": parts}) + "\n")
    return results


def print_rows(results: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Print the medians of each contender and the ratio of its total to that of the first one; return them."""
    columns = ("total", *PARTS, "ended")
    print(f"{'':22}" + "".join(f"{column:>11}" for column in columns) + "  over")
    rows: dict[str, dict[str, float]] = {}
    base = [parts["total"] for parts in next(iter(results.values()))]
    for name, rounds in results.items():
        rows[name] = {column: median([parts[column] for parts in rounds]) for column in columns}
        rows[name]["over"] = median_ratio([parts["total"] for parts in rounds], base)
        cells = "".join(f"{rows[name][column]:11.2f}" for column in columns)
        print(f"{name:22}{cells}  {rows[name]['over']:.3f}")
    return rows


def main() -> None:
    parser = argument_parser(__doc__, rounds=5)
    parser.add_argument("--kills", type=int, default=4, help="per contender and round")
    parser.add_argument("--keep", type=Path, help="file of the results, with which a repeated command continues")
    arguments = parser.parse_args()
    results = measure(arguments.rounds, arguments.kills, arguments.keep)

    print(f"{NUM_RANKS} gloo ranks, medians of {arguments.rounds} rounds of {arguments.kills} kills; seconds\n")
    rows = print_rows(results)
    if arguments.json:
        print(json.dumps({"benchmark": "recovery", "rounds": arguments.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
