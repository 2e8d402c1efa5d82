"""What reports show: a run folder as supervisor and ranks write it, and results of a communication benchmark."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml

from hpcdist.host.json_files import write_json
from hpcdist.review.ledger import Entry, Interval, Ledger
from hpcdist.run.attempt_times import CAUSES, AttemptTimes, Cause, NodeShare, Resources, begin, write_times
from hpcdist.run.figures import Figure, write_figure
from hpcdist.run.folder import RunDir, State
from hpcdist.trainers.comm.results import CheckResult, RankPlace, Results, Row

CONFIG: dict[str, Any] = {
    "experiment": "digits",
    "name": "first",
    "trainer": {"target": "ddp", "script": []},
    "optim": {"lr": 0.001},
    "data": {"batch_size": 16},
    "checkpoint": {"monitor": "eval/accuracy", "monitor_mode": "max"},
    "tracking": {"tags": {}},
}
_BEGAN = 1_760_000_000.0


class ReportScene:
    """One run folder."""

    def __init__(self, root: Path, name: str = "first") -> None:
        self.run = RunDir.create(root / "runs" / "digits" / name)
        self.write_config({})
        write_json(self.run.environment, {"host": "n1", "user": "ada", "git_commit": "abc", "versions": {"torch": "2"}})
        self.state()

    def write_config(self, changes: dict[str, Any]) -> None:
        self.run.config.write_text(yaml.safe_dump(CONFIG | changes))

    def state(self, **changes: Any) -> None:
        self.state_of(self.run, **changes)

    @staticmethod
    def state_of(run: RunDir, **changes: Any) -> None:
        values = {"status": "finished", "attempt": 1, "reason": "trained 90 steps", "world_size": 4, "created": _BEGAN}
        run.write_state(State(**{**values, "ended": _BEGAN + 100, **changes}))

    def log(self, metrics: dict[str, list[float]], *, attempt: int = 1, rank: int = 0, first: int = 1) -> None:
        """Write values of metrics at the steps from `first` on."""
        path = self.run.journal / f"attempt-{attempt:03d}.rank-{rank:05d}.jsonl"
        now = int(time.time() * 1000)
        with open(path, "a") as file:
            for index in range(max(map(len, metrics.values()))):
                values = {key: values[index] for key, values in metrics.items() if index < len(values)}
                file.write(json.dumps({"t": now + index, "s": first + index, "m": values}) + "\n")

    def attempt_file(self, name: str, content: Any, attempt: int = 1) -> None:
        folder = self.run.attempt(attempt).path
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content) + "\n")

    def failed(self, sentence: str, attempt: int = 1) -> None:
        """Write the times of a failed attempt, with the sentence of the supervisor."""
        times = AttemptTimes(supervised=_BEGAN, began=_BEGAN, ended=_BEGAN + 50, status="failed", reason=sentence)
        write_times(self.run.attempt(attempt), times)

    def figure(self, name: str, figure: Figure) -> None:
        write_figure(self.run.artifacts, name, figure)


def failure(error: str, **changes: Any) -> dict[str, Any]:
    values = {"kind": "killed", "rank": 1, "host": "n2", "step": 40, "error": error, "traceback": [], "role": ""}
    return values | changes


def some_ledger() -> Ledger:
    """Return a ledger of two attempts on two nodes."""
    causes: tuple[Cause, ...] = ("start", "compute", "communication", "checkpoint", "redone", "idle", "down")
    entries = [
        Entry(cause=cause, attempt=1 + number % 2, node=f"n{1 + number % 2}", seconds=10.0 * (number + 1))
        for number, cause in enumerate(causes)
    ]
    with_queue: tuple[Literal["queue"] | Cause, ...] = ("queue", *CAUSES)
    intervals = [
        Interval(cause=cause, attempt=attempt, began=began, ended=began + 5)
        for attempt in (1, 2)
        for number, cause in enumerate(with_queue)
        for began in [_BEGAN + 70 * attempt + 6 * number]
    ]
    ledger = Ledger(spans=((0.0, 64.0),), queue_s=9.0, energy_kwh=0.25, energy_of="nodes")
    return replace(ledger, entries=tuple(entries), intervals=tuple(intervals))


# --- Run folders with the files from which the ledger of a run is computed, without processes.


BEGAN = 1_795_000_000.0
TWO_NODES = Resources(
    nodes={"n1": NodeShare(allocated=3, share=1, ranks=[0, 1]), "n2": NodeShare(allocated=2, share=1, ranks=[2, 3])}
)


def add_attempt(
    run: RunDir,
    began: float,
    ended: float | None,
    accounts: Sequence[dict[str, Any] | None],
    resources: Resources = TWO_NODES,
    *,
    supervised: float | None = None,
    **changes: Any,
) -> None:
    """Add an attempt; times are relative to BEGAN."""
    attempt = run.new_attempt()
    if ended is not None:
        changes = {"status": "failed" if changes.get("failed") else "finished", **changes}
    times = AttemptTimes(
        supervised=BEGAN + (began - 1 if supervised is None else supervised),
        began=BEGAN + began,
        ended=None if ended is None else BEGAN + ended,
        **changes,
    )
    begin(attempt, resources, times)
    for rank, account in enumerate(accounts):
        beat = {"time": BEGAN + (account["until"] if account else began), "step": 7, "total_steps": 9, "metrics": {}}
        if account is not None:
            moved = {key: BEGAN + account[key] for key in ("began", "until")}
            beat["account"] = {"cause": "compute", "closed": True, **account, **moved}
        write_json(attempt.beat(rank), beat)


def account(began: float, until: float, **changes: Any) -> dict[str, Any]:
    """Return an account: one second of data, the rest compute."""
    return {"began": began, "until": until, "seconds": {"data": 1.0, "compute": until - began - 1.0}, **changes}


# --- Results of a communication benchmark on a healthy cluster.


def sample(num_nodes: int = 4, per_node: int = 1, **changed: Any) -> Results:
    """Return results of nodes n1, n2, … with consecutive ranks; `changed` are fields of the results."""
    ranks = [RankPlace(rank=i, node=f"n{i // per_node + 1}", device="cpu") for i in range(num_nodes * per_node)]
    results = Results(
        backend="gloo",
        device="cpu",
        world_size=len(ranks),
        torch="2.15.0",
        nccl=None,
        partition="main",
        nodes=[f"n{i + 1}" for i in range(num_nodes)],
        ranks=ranks,
        complete=True,
        checked=[
            CheckResult(operation="all_reduce", dtype="float32", ok=True),
            CheckResult(operation="broadcast", dtype="int32", ok=True),
        ],
        rows=_rows(),
    )
    return replace(results, **changed)


def _rows() -> list[Row]:
    """Return operations that take a start-up time plus size / speed, and a barrier."""
    rows = [
        row(operation, start_s + size / speed, size)
        for operation, start_s, speed in (("reduce", 4e-4, 3e8), ("all_reduce", 2e-4, 6e8), ("broadcast", 1e-4, 9e8))
        for size in (2**power for power in range(29))
    ]
    return [*rows, row("barrier", 2e-4, 0, algbw=None, busbw=None)]


def row(operation: str, median_s: float, size: int, **changed: Any) -> Row:
    """Return a measurement with a p99 of twice the median."""
    found = Row(
        operation=operation,
        size=size,
        bytes=size,
        iterations=40,
        median_s=median_s,
        p99_s=2 * median_s,
        min_s=0.9 * median_s,
        algbw=size / median_s,
        busbw=1.5 * size / median_s,
    )
    return replace(found, **changed)
