"""Run the fuzz targets of tests/fuzz with random seeds for a number of minutes: `make fuzz MINUTES=30`.

Each round is a separate process, so a crash of the interpreter ends one round only and is reported as a failure.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLES_PER_ROUND = 100


def main(minutes: float) -> int:
    """Print a line of progress per round; return 1 if an example failed."""
    # With FUZZ_FOLDER of an earlier run, its failing examples are tried first.
    folder = Path(os.environ.get("FUZZ_FOLDER") or tempfile.mkdtemp(prefix="hpcdist-fuzz-", dir="/var/tmp"))
    env = os.environ | {"FUZZ_FOLDER": str(folder), "FUZZ_EXAMPLES": str(EXAMPLES_PER_ROUND)}
    until = time.monotonic() + minutes * 60
    failed: list[Path] = []
    number = 0
    while time.monotonic() < until:
        number += 1
        seed = random.SystemRandom().randrange(2**32)
        options = ("-q", "-m", "not faults", "--timeout", "3600", f"--hypothesis-seed={seed}")
        command = (sys.executable, "-m", "pytest", "tests/fuzz", *options)
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            report = folder / f"round-{number:03d}-seed-{seed}.txt"
            report.write_text(done.stdout)
            failed.append(report)
        counts = json.loads((folder / "executed.json").read_text()) if (folder / "executed.json").exists() else {}
        left = max(0.0, until - time.monotonic()) / 60
        print(
            f"round {number}: {sum(counts.values()):,} examples"
            f" ({', '.join(f'{name} {count:,}' for name, count in sorted(counts.items()))}),"
            f" {len(failed)} failed rounds, {left:.0f} min left",
            flush=True,
        )
    for report in failed:
        print(f"failed: {report}")
    print(f"failing examples, if any, are kept in {folder}; the same command with FUZZ_FOLDER tries them first")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
