"""Upload of a journal to sqlite and PostgreSQL beside MLflow's own `log_batch`: time and resident memory.

    python benchmarks/million_records.py [--records 1000000] [--rounds 1] [--stores sqlite postgresql] [--json]

The journal has one record per step, each with one of ten metrics. Each contender is a process of its own with a new
database, one after another in each round:

shipper            `hpcdist sync` without a limit of points
shipper, default   the same with the limit
log_batch          MLflow's client with 1,000 metrics per call, from memory, without a journal

PostgreSQL runs on this machine with `fsync=off`, as in the tests (`tests/support/postgres_cluster.py`).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from harness import argument_parser

HERE = Path(__file__).parent
NUM_KEYS = 10
BATCH = 1000
CONTENDERS = ("shipper", "shipper, default", "log_batch")


def records(number: int) -> Iterator[tuple[str, float, int, int]]:
    """Yield key, value, time in ms and step."""
    for step in range(number):
        yield f"train/metric_{step % NUM_KEYS}", step * 0.123456789 % 1, 1_760_000_000_000 + step, step


def make_run(folder: Path, number: int) -> Path:
    """Make a finished run with a journal."""
    from hpcdist.run.folder import RunDir, State

    run = RunDir.create(folder / "runs" / "benchmark" / "run")
    run.config.write_text("{experiment: benchmark}\n")
    run.write_state(State(status="finished", attempt=1, created=1.76e9, ended=1.77e9))
    with open(run.journal / "attempt-001.rank-00000.jsonl", "w") as file:
        for key, value, time_ms, step in records(number):
            file.write(f'{{"t":{time_ms},"s":{step},"m":{{"{key}":{value!r}}}}}\n')
    return run.path


def upload(uri: str, path: str, *, all_points: bool) -> dict[str, float]:
    """Upload the run as `hpcdist sync` does, or without its limit of points."""
    from hpcdist.run.folder import RunDir
    from hpcdist.tracking import point_budget
    from hpcdist.tracking.mlflow_client import open_client
    from hpcdist.tracking.sync_runs import sync

    if all_points:
        point_budget.EXACT_POINTS = 10**12
    open_client(uri)
    return measured(lambda: sync(RunDir.open(Path(path)), uri).num_points)


def log_batches(uri: str, number: int) -> dict[str, float]:
    """Log the same points with MLflow's client."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client = MlflowClient(tracking_uri=uri)
    run_id = client.create_run(client.create_experiment("benchmark")).info.run_id

    def log_all() -> int:
        batch: list[Metric] = []
        for record in records(number):
            batch.append(Metric(*record))
            if len(batch) == BATCH:
                client.log_batch(run_id, metrics=batch, synchronous=True)
                batch = []
        client.log_batch(run_id, metrics=batch, synchronous=True)
        client.set_terminated(run_id)
        return number

    return measured(log_all)


def measured(work: Callable[[], int]) -> dict[str, float]:
    began, cpu_began = time.perf_counter(), time.process_time()
    num_points = work()
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return {
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu_began,
        "resident_mb": int(line.split()[1]) * 1024 / 1e6,
        "points": num_points,
    }


def run_contender(name: str, uri: str, number: int, folder: Path) -> dict[str, float]:
    """Measure a contender in a process of its own, and check that the database has each point once."""
    if name == "log_batch":
        arguments = ["--contender", name, "--uri", uri, "--records", str(number)]
    else:
        path = make_run(folder, number)
        arguments = ["--contender", name, "--uri", uri, "--path", str(path)]
    env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(
        [sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True, env=env
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    stored = count_points(uri)
    if stored != found["points"]:
        sys.exit(f"{name}: {stored} points in the database, {found['points']} sent")
    return found


def count_points(uri: str) -> int:
    import sqlalchemy

    engine = sqlalchemy.create_engine(uri)
    with engine.connect() as connection:
        total, points = (
            connection.execute(sqlalchemy.text(f"select count(*) from ({query}) as points")).scalar_one()
            for query in ("select key from metrics", "select distinct key, step from metrics")
        )
    engine.dispose()
    assert total == points, "a point was stored twice"
    return int(total)


def main() -> None:
    parser = argument_parser(__doc__, rounds=1)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--stores", nargs="+", choices=("sqlite", "postgresql"), default=["sqlite", "postgresql"])
    for hidden in ("--contender", "--uri", "--path"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable()
    if arguments.contender == "log_batch":
        print(json.dumps(log_batches(arguments.uri, arguments.records)))
        return
    if arguments.contender:
        print(json.dumps(upload(arguments.uri, arguments.path, all_points=arguments.contender == "shipper")))
        return
    rows: dict[str, dict[str, list[dict[str, float]]]] = {}
    load = os.getloadavg()
    with ExitStack() as stack:
        if "postgresql" in arguments.stores:
            sys.path.append(str(HERE.parent / "tests" / "support"))
            from postgres_cluster import postgres_cluster

            cluster = stack.enter_context(postgres_cluster())
        for number in range(arguments.rounds):
            for store in arguments.stores:
                for place, name in enumerate(CONTENDERS):
                    folder = Path(tempfile.mkdtemp())
                    stack.callback(shutil.rmtree, folder, ignore_errors=True)
                    uri = (
                        f"sqlite:///{folder}/mlflow.db"
                        if store == "sqlite"
                        else cluster.create_database(f"round_{number}_{place}")
                    )
                    found = run_contender(name, uri, arguments.records, folder)
                    rows.setdefault(store, {}).setdefault(name, []).append(found)
                    shutil.rmtree(folder)
    report(rows, load, arguments)


def report(
    rows: dict[str, dict[str, list[dict[str, float]]]], load: tuple[float, ...], arguments: argparse.Namespace
) -> None:
    print(f"{arguments.records:,} records, {arguments.rounds} round(s), load before {load[0]:.0f}, now", end=" ")
    print(f"{os.getloadavg()[0]:.0f}; medians\n\n{'':<32}{'s':>8}{'CPU s':>8}{'MB':>7}{'points':>10}{'ratio':>8}")
    results: dict[str, dict[str, float]] = {}
    for store, by_name in rows.items():
        for name, found in by_name.items():
            row = {key: statistics.median(one[key] for one in found) for key in found[0]}
            pairs = zip(found, by_name["log_batch"], strict=True)
            row["over_log_batch"] = statistics.median(own["seconds"] / other["seconds"] for own, other in pairs)
            results[f"{store}, {name}"] = row
            print(
                f"{store + ', ' + name:<32}{row['seconds']:>8.1f}{row['cpu_s']:>8.1f}{row['resident_mb']:>7.0f}"
                f"{row['points']:>10.0f}{row['over_log_batch']:>8.2f}"
            )
    if arguments.json:
        print(json.dumps({"records": arguments.records, "rows": results}))


if __name__ == "__main__":
    main()
