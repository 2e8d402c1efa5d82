"""Cost of steps out of order for the shipper: CPU time and resident memory, without MLflow.

    python benchmarks/shipping.py [--records 1000000] [--json] [--folder DIR]

Each journal is read completely in a process of its own. Those of 300 keys have 1,100 records (13 MB), those of one key
a million:

in order        the steps rise
late record     at the end a record with a step between theirs
out of order    shuffled steps
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from harness import argument_parser

from hpcdist.tracking.journal_tail import JournalTail
from hpcdist.tracking.sent_points import SentPoints

#: Size of the journals with many keys.
NUM_KEYS, NUM_RECORDS = 300, 1_100


def write(folder: Path, records: Iterable[tuple[int, dict[str, float]]]) -> None:
    with open(folder / "attempt-001.rank-00000.jsonl", "w") as file:
        for step, metrics in records:
            file.write(json.dumps({"t": 1_760_000_000_000, "s": step, "m": metrics}, separators=(",", ":")) + "\n")


def journals(num_records: int) -> dict[str, Iterable[tuple[int, dict[str, float]]]]:
    """Return the records of each journal; `num_records` is the number of those with one key."""
    metrics = {f"layer/{number:03d}/gradient_norm": 0.123456789 for number in range(NUM_KEYS)}
    rising = [10 * number for number in range(1, NUM_RECORDS + 1)]
    shuffled = random.Random(0).sample(range(num_records), num_records)
    return {
        "300 keys, in order": ((step, metrics) for step in rising),
        "300 keys, late record": ((step, metrics) for step in (*rising, 15)),
        "one key, in order": ((step, {"loss": 0.5}) for step in range(num_records)),
        "one key, out of order": ((step, {"loss": 0.5}) for step in shuffled),
    }


def peak_mb() -> float:
    """Return the peak resident memory of this process; `ru_maxrss` includes its parent's before exec."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024 / 1e6


def read(folder: Path) -> dict[str, float]:
    """Read a journal as the shipper does and discard the points."""
    before_mb = peak_mb()
    progress = SentPoints()
    tail = JournalTail(folder, progress)
    began = time.process_time()
    num_points = 0
    while chunks := tail.next_chunks(1, over=True):
        num_points += len(tail.new_points(chunks))
        progress.offsets |= {name: chunk.offset for name, chunk in chunks.items()}
    return {
        "cpu_s": time.process_time() - began,
        "resident_mb": peak_mb() - before_mb,
        "points": num_points,
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--records", type=int, default=1_000_000, help="records of the journals with one key")
    parser.add_argument("--folder", type=Path, default=None, help="folder of the journals (default: a temporary one)")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read is not None:
        print(json.dumps(read(arguments.read)))
        return
    rows = {}
    for name, records in journals(arguments.records).items():
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            write(Path(folder), records)
            command = [sys.executable, __file__, "--read", folder]
            rows[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{'':<34}{'CPU s':>8}{'MB':>8}{'points':>10}")
    for name, row in rows.items():
        print(f"{name:<34}{row['cpu_s']:>8.1f}{row['resident_mb']:>8.1f}{row['points']:>10.0f}")
    if arguments.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
