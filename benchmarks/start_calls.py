"""File-system calls of the start of a run, per rank, counted by strace.

    python benchmarks/start_calls.py [--ranks 2 8] [--only forked] [--json]

`hpcdist run` with one step of DDP (`baselines/first_step_trainer.py`), with ranks that import torch themselves and
with ranks that a parent process forks after the import (`launch.fork`). All processes are traced: supervisor, parent
process, ranks and shipper. The calls per rank are the difference between the two numbers of ranks over the difference
of these numbers; the rest is the share that does not depend on the number of ranks. Counts do not depend on the load.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from harness import HPCDIST, argument_parser, call, clean_env
from startup import make_project

#: Calls by kind; the names of system calls differ between machines.
KINDS = {
    "open": ("open", "openat"),
    "stat": ("stat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2", "readlink", "readlinkat"),
    "list": ("getdents64",),
}

#: `launch.fork` by name.
MODES = {"each rank imports": False, "forked": True}
TRACED = "trace=?" + ",?".join(name for names in KINDS.values() for name in names)


def count(folder: Path, num_ranks: int, *, fork: bool) -> Counter[str]:
    """Run once under strace; return the calls of all processes by kind."""
    project, trace = folder / f"project-{num_ranks}-{fork}", folder / "trace"
    project.mkdir()
    make_project(project, num_ranks)
    shutil.rmtree(trace, ignore_errors=True)
    trace.mkdir()
    # With a filter in the kernel, the other calls do not stop the process.
    command = [
        "strace",
        "--seccomp-bpf",
        "--follow-forks",
        "--output-separately",
        "-e",
        TRACED,
        "--output",
        str(trace / "calls"),
    ]
    run = [*HPCDIST, "run", "trainer.yaml", f"runs_dir={folder}/runs", f"params.out={folder}/sum.txt"]
    call([*command, *run, f"launch.fork={str(fork).lower()}"], project, {**clean_env(), "OMP_NUM_THREADS": "1"})
    kind_of = {name: kind for kind, names in KINDS.items() for name in names}
    found: Counter[str] = Counter()
    for path in trace.iterdir():
        for line in path.read_text(errors="replace").splitlines():
            if kind := kind_of.get(line.partition("(")[0]):
                found[kind] += 1
    return found


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs=2, default=[2, 8])
    parser.add_argument("--only", default="", choices=("", *MODES), help="measure one of the two")
    arguments = parser.parse_args()
    few, many = arguments.ranks
    if shutil.which("strace") is None:
        sys.exit("strace is not installed")

    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="start_calls_") as name:
        for mode, fork in MODES.items():
            if arguments.only not in ("", mode):
                continue
            low, high = (count(Path(name), num_ranks, fork=fork) for num_ranks in (few, many))
            per_rank = {kind: (high[kind] - low[kind]) / (many - few) for kind in KINDS}
            rows[mode] = {
                **per_rank,
                **{f"other {kind}": low[kind] - few * per_rank[kind] for kind in KINDS},
            }
    print(f"file-system calls per rank, from runs with {few} and {many} ranks; others do not depend on the number\n")
    columns = [*KINDS, *(f"other {kind}" for kind in KINDS)]
    print(f"{'':20}" + "".join(f"{column:>12}" for column in columns))
    for key, row in rows.items():
        print(f"{key:20}" + "".join(f"{row[column]:12.0f}" for column in columns))
    if arguments.json:
        print(json.dumps({"benchmark": "start_calls", "rows": rows}))


if __name__ == "__main__":
    main()
