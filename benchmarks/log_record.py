"""Time that one metric record takes in the training process: the journal, MLflow's `log_metric` and `log_batch`.

MLflow's client is measured with a database, with a server, and as in a rank, where its tracking store is hpcdist's.

    OMP_NUM_THREADS=1 python benchmarks/log_record.py [--json] [--folder DIR]

Records of one and of five metrics. The kinds alternate within a round, so that other load affects all of them; the
result is the median over rounds of the mean time per record. When the call returns, the journal's record is in the
kernel's page cache, and MLflow's record is in its database, or with asynchronous logging in the memory of the process;
this queue is emptied after each measurement. A checkpoint adds one durable flush of the journal.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import argument_parser
from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.utils.async_logging.run_operations import RunOperations

from hpcdist.run.folder import RunDir
from hpcdist.tracking import rank_records
from hpcdist.tracking.journal import JournalWriter
from hpcdist.tracking.mlflow_client import open_client
from hpcdist.tracking.rank_records import RankRecords

Log = Callable[[dict[str, float], int], RunOperations | None]
METRICS = {count: {f"train/metric_{index}": 0.1234567 * (index + 1) for index in range(count)} for count in (1, 5)}


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Start a local `mlflow server` with a new database; yield its URI as soon as it accepts connections."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", str(folder)]
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with open(folder / "server.log", "wb") as output:
        process = subprocess.Popen(command, env=env, start_new_session=True, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 120
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit(f"mlflow server did not start: {(folder / 'server.log').read_text()[-2000:]}")
            signal.sigtimedwait([signal.SIGTERM], 0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def rank_client(folder: Path) -> Iterator[MlflowClient]:
    """Yield a client as the code of rank 0 has it: it writes to the journal of a run folder."""
    records = rank_records.begin(
        RankRecords(RunDir.create(folder / "bench" / "run"), attempt=1, rank=0, pid=os.getpid())
    )
    os.environ.update(records.environment())
    yield MlflowClient()
    records.close()


def mlflow_loggers(client: MlflowClient) -> tuple[Log, Log, Log]:
    """Return functions that log by MLflow's client: one call per metric, per record, and per record asynchronously."""
    run_id = client.create_run(client.create_experiment("bench")).info.run_id

    def log_metric(metrics: dict[str, float], step: int) -> None:
        for key, value in metrics.items():
            client.log_metric(run_id, key, value, step=step, synchronous=True)

    def log_batch(metrics: dict[str, float], step: int, synchronous: bool = True) -> RunOperations | None:
        now = int(time.time() * 1000)
        return client.log_batch(run_id, [Metric(k, v, now, step) for k, v in metrics.items()], synchronous=synchronous)

    return log_metric, log_batch, lambda metrics, step: log_batch(metrics, step, synchronous=False)


def per_record_us(log: Log, metrics: dict[str, float], first_step: int, num_records: int) -> float:
    start = time.perf_counter()
    queued = [log(metrics, step) for step in range(first_step, first_step + num_records)]
    taken = time.perf_counter() - start
    for record in filter(None, queued):
        record.wait()
    return taken / num_records * 1e6


def flush_us(writer: JournalWriter, step: int) -> float:
    writer.log(METRICS[5], step)
    start = time.perf_counter()
    writer.flush()
    return (time.perf_counter() - start) * 1e6


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return microseconds per record by kind and round, without the first round."""
    with server(folder) as uri, JournalWriter(folder) as writer, rank_client(folder) as client:
        sqlite = mlflow_loggers(open_client(f"sqlite:///{folder}/mlflow.db"))
        remote = mlflow_loggers(open_client(uri))
        in_rank = mlflow_loggers(client)
        # MLflow takes a thousand times as long per record, so it gets fewer of them.
        kinds: dict[str, tuple[Log, int]] = {
            "journal": (writer.log, 2000),
            "MLflow in a rank, log_metric": (in_rank[0], 500),
            "MLflow in a rank, log_batch": (in_rank[1], 500),
            "MLflow sqlite, log_metric": (sqlite[0], 10),
            "MLflow sqlite, log_batch": (sqlite[1], 10),
            "MLflow server, log_metric": (remote[0], 10),
            "MLflow server, log_batch": (remote[1], 10),
            "MLflow server, asynchronous": (remote[2], 10),
        }
        times: dict[str, list[float]] = {}
        for turn in range(rounds + 1):
            for name, (log, num_records) in kinds.items():
                for count, metrics in METRICS.items():
                    value = per_record_us(log, metrics, turn * 10_000, num_records)
                    if turn:
                        times.setdefault(f"{name}, {count}", []).append(value)
            if turn:
                times.setdefault("journal, durable flush", []).append(flush_us(writer, turn))
    return times


def main() -> None:
    parser = argument_parser(__doc__, rounds=15)
    parser.add_argument("--folder", type=Path, help="folder of journal and database (default: a temporary one)")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        times = measure(Path(name), arguments.rounds)
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    print(
        f"time per record, by kind and number of metrics; {os.cpu_count()} CPUs, median of {arguments.rounds} rounds\n"
    )
    of_rank = medians["MLflow sqlite, log_metric, 1"] / medians["MLflow in a rank, log_metric, 1"]
    print(f"{'':32}{'µs':>10}{'min':>10}{'max':>10}{'over the journal':>18}")
    for kind, value in medians.items():
        count = kind[-1] if kind[-1].isdigit() else "5"
        ratio = value / medians[f"journal, {count}"]
        print(f"{kind:32}{value:10.1f}{min(times[kind]):10.1f}{max(times[kind]):10.1f}{ratio:18.0f}")
    print(f"\nlog_metric of one metric: sqlite takes {of_rank:.0f} times as long as MLflow in a rank")
    if arguments.json:
        print(
            json.dumps(
                {"benchmark": "log_record", "cpus": os.cpu_count(), "median_us": medians, "sqlite_over_rank": of_rank}
            )
        )


if __name__ == "__main__":
    main()
