"""Checkpoints of a model that is sharded by FSDP2: hpcdist, and torch.distributed.checkpoint (DCP).

    python benchmarks/sharded_checkpoint.py [--rounds 6] [--megabytes 165] [--json] [--folder DIR]

Two gloo ranks with one thread each save the same state (weights and two Adam moments) in turn, in one `hpcdist run`.
DCP keeps what it can keep between saves: its plan, and for `async_save` the host memory of a stager. It writes with
fsync unless the row says otherwise, and computes a CRC-32 of each tensor instead of a hash of each file. Values are the
largest of the ranks; the results are medians over rounds, without the first one. The stall is the time until the call
returns, with no earlier save in progress; its CPU is the processor time of the calling thread, which tells more on a
machine with other work. For `dcp.async_save` that is the copy alone; ours also compares the ranks' tensors and sends
the states of their random number generators to rank 0. `durable` is the time until all ranks have written, and `CPU`
the processor time of a rank until then. Old checkpoints are removed between the measurements.
`steps` is the duration of the three steps after a save over that of the three before. `peak` is the growth of a rank's
resident memory from the call until the state is on disk, in the first round, in which memory is allocated. Nothing else
runs meanwhile, because the training's own memory grows by up to 80 MB in any three steps, with or without a save.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from harness import BASELINES, HPCDIST, argument_parser, call, clean_env, median, median_ratio

NUM_RANKS = 2
TRAINER = "sharded_trainer"


def measure(folder: Path, rounds: int, megabytes: int) -> dict[str, list[dict[str, float]]]:
    """Return the values of each kind of save, by round; the first round is one more."""
    shutil.copy(BASELINES / f"{TRAINER}.py", folder)
    config = {
        "experiment": "sharded",
        "name": "ours",
        "runs_dir": str(folder),
        "trainer": f"{TRAINER}:train",
        "params": {"rounds": rounds, "megabytes": megabytes, "folder": str(folder)},
        "tracking": {"uri": ""},
        "checkpoint": {"keep_last": 1000},  # the trainer removes old checkpoints, those of DCP as well
        "launch": {"num_ranks": NUM_RANKS, "device": "cpu", "num_threads": 1},
    }
    (folder / "sharded.yaml").write_text(json.dumps(config))  # JSON is YAML
    call([*HPCDIST, "run", "sharded.yaml"], folder, clean_env())
    rows: dict[str, list[dict[str, float]]] = json.loads((folder / "rows.json").read_text())
    return rows


def main() -> None:
    parser = argument_parser(__doc__, rounds=6)
    parser.add_argument("--megabytes", type=int, default=165)
    parser.add_argument("--folder", type=Path, help="folder of the checkpoints (default: a temporary one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        rows = measure(Path(name), arguments.rounds, arguments.megabytes)

    part_mb = arguments.megabytes / NUM_RANKS
    result: dict[str, object] = {
        "benchmark": "sharded_checkpoint",
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "rounds": arguments.rounds,
        "part_mb": part_mb,
    }
    table: dict[str, dict[str, float]] = {}
    print(f"{arguments.megabytes} MB on {NUM_RANKS} ranks, torch {torch.__version__}, median of {arguments.rounds}\n")
    print(f"{'':24}{'stall ms':>10}{'min':>8}{'its CPU':>9}{'min':>8}", end="")
    print(f"{'durable ms':>12}{'min':>8}{'CPU ms':>8}{'steps':>8}{'peak MB':>9}")
    for kind, (first, *others) in rows.items():
        stalls = [row["stall_s"] for row in others]
        stall_cpus = [row["stall_cpu_s"] for row in others]
        durables = [row["durable_s"] for row in others]
        table[kind] = {
            "stall_s": median(stalls),
            "stall_cpu_s": median(stall_cpus),
            "durable_s": median(durables),
            "cpu_s": median([row["cpu_s"] for row in others]),
            "step_over_usual": median([row["step_over_usual"] for row in others]),
            "peak_mb": first["peak_mb"],
            "peak_over_part_mb": first["peak_mb"] - part_mb,
        }
        row = table[kind]
        print(f"{kind:24}{row['stall_s'] * 1e3:10.0f}{min(stalls) * 1e3:8.0f}", end="")
        print(f"{row['stall_cpu_s'] * 1e3:9.0f}{min(stall_cpus) * 1e3:8.0f}{row['durable_s'] * 1e3:12.0f}", end="")
        print(f"{min(durables) * 1e3:8.0f}{row['cpu_s'] * 1e3:8.0f}{row['step_over_usual']:8.2f}{row['peak_mb']:9.0f}")
    ratios = {}
    for kind, values in rows.items():
        for key in ("stall_s", "stall_cpu_s", "durable_s", "cpu_s"):
            ours = [row[key] for row in rows["hpcdist"][1:]]
            ratios[f"{key.removesuffix('_s')} over {kind}"] = median_ratio(ours, [row[key] for row in values[1:]])
    for text, ratio in ratios.items():
        print(f"{text:40}{ratio:.2f}")
    result |= {"rows": table, "ratios": ratios}
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
