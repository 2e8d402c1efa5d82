"""The folder of one attempt: names of its files, requests to stop, outcomes and heartbeats of its ranks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hpcdist.errors import RunFolderError
from hpcdist.files import formats, retry
from hpcdist.files.atomic import read_json, read_json_lines, write_json

KEY_BYTES = 32
#: Why an attempt is to end. `signal`: a signal to a supervisor outside of a job. `preemption`: Slurm ends the job, also
#: for a requeue or a cancellation. `growth`: the ranks are restarted on more nodes. `config`: `stop.pause_at_step`.
Cause = Literal["user", "signal", "time_limit", "preemption", "growth", "config"]
_SENTENCES: dict[Cause, str] = {
    "user": "{by}",
    "signal": "{by} to the supervisor",
    "time_limit": "time limit",
    "preemption": "Slurm ends the job",
    "growth": "to restart on more nodes: {by} answers again",
    "config": "{by}",
}
_OUTCOME = re.compile(r"rank-([0-9]{1,9})\.outcome\.json")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to end an attempt."""

    action: Literal["stop", "cancel"] = "stop"
    cause: Cause  #: decides about restarts and requeues
    by: str = ""  #: for messages only: the command and its user, a signal, nodes, or a key

    @property
    def ends_run(self) -> bool:
        """Whether the run ends with the attempt."""
        return self.cause != "growth"

    @property
    def sentence(self) -> str:
        """Cause and author."""
        return _SENTENCES[self.cause].format(by=self.by)

    def after(self, how: str) -> str:
        """Return how an attempt ended, if that is known, and this request as the cause."""
        return f"{how} ({self.sentence})" if how else self.sentence


class Attempt:
    """`attempts/NNN/`: one start of all ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = int(path.name)
        #: Secret of this attempt, 32 random bytes, that authenticates its processes (`rank/network/curve.py`).
        self.key = path / "key"
        #: The request to stop or cancel this attempt, see `Request`.
        self.request = path / "request.json"
        #: The first failure of this attempt (`supervisor/restart_policy.py`).
        self.failure = path / "failure.json"
        #: Result of the preflight check on the nodes of a Slurm job (`slurm/job/preflight_step.py`).
        self.preflight = path / "preflight.json"
        #: Begin and end of this attempt, and the resources of its ranks (`run/attempt_times.py`).
        self.times = path / "times.json"
        #: Phases of rank 0 with begin and end, one JSON line each (`rank/telemetry/heartbeat.py`).
        self.phases = path / "phases.jsonl"
        #: Result of the collective check before training (`rank/collective_check.py`).
        self.network = path / "network.json"
        #: Straggler events, one JSON line each (`supervisor/stragglers.py`).
        self.stragglers = path / "stragglers.jsonl"
        #: Summary of the stack traces of a hang; the first line is one sentence.
        self.stacks_summary = path / "stacks.txt"
        #: The same of a run that made no progress but was not ended.
        self.silence = path / "silence.txt"

    def log(self, rank: int) -> Path:
        """Return the file with a rank's output."""
        return self.path / f"rank-{rank:05d}.log"

    def read_key(self) -> bytes:
        """Return the content of `key`. Raises RunFolderError if it cannot be read or has another length."""
        try:
            content = retry.retry(self.key.read_bytes, self.key)
        except OSError as error:
            raise RunFolderError(f"{self.key}: the attempt's key cannot be read: {error.strerror}") from error
        if len(content) != KEY_BYTES:
            raise RunFolderError(f"{self.key}: the attempt's key has {len(content)} bytes, not {KEY_BYTES}")
        return content

    def write_key(self, key: bytes) -> None:
        """Write the key, mode 0600; repeating a write that failed half-way replaces the file."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(self.key, flags, 0o600), "wb") as file:
            file.write(key)

    def beat(self, rank: int) -> Path:
        """Return the file with a rank's newest heartbeat."""
        return self.path / f"rank-{rank:05d}.beat.json"

    def read_beat(self, rank: int) -> dict[str, Any] | None:
        """Return the last heartbeat of a rank; None before the first one, or if it is damaged or half written."""
        found = read_json(self.beat(rank)) if self.beat(rank).is_file() else None
        return found if found is not None and _is_beat(found) else None

    def outcome(self, rank: int) -> Path:
        """Return the file with a rank's result."""
        return self.path / f"rank-{rank:05d}.outcome.json"

    def stacks(self, rank: int) -> Path:
        """Stack traces of all threads of a hung rank, and the state of its process."""
        return self.path / f"rank-{rank:05d}.stacks.txt"

    def flight(self, rank: int) -> Path:
        """The last collectives of a rank (`rank/telemetry/flight_recorder.py`), written on request."""
        return self.path / f"rank-{rank:05d}.flight.json"

    def command(self, number: int) -> Path:
        """A command to the ranks that does not end the attempt (`run/live_command.py`)."""
        return self.path / f"command-{number:03d}.json"

    def command_result(self, number: int, rank: int) -> Path:
        """What a rank has done on a command."""
        return self.path / f"command-{number:03d}.rank-{rank:05d}.json"

    def node_stacks(self, node: str) -> Path:
        """Snapshots of the ranks on one node, for the supervisor (`supervisor/hang`)."""
        return self.path / f"node-{node}.stacks.json"

    def straggler_events(self) -> list[dict[str, Any]]:
        """Return all straggler events in order, without damaged lines."""
        texts = ("role", "name", "event", "text")
        return [
            event for event in read_json_lines(self.stragglers) if all(isinstance(event.get(key), str) for key in texts)
        ]

    def current_stragglers(self) -> list[str]:
        """Return the last message about each node or rank that is a straggler now, or was at the end."""
        last = {(event["role"], event["name"]): event for event in self.straggler_events()}
        return [event["text"] for event in last.values() if event["event"] == "slow"]

    def send_request(self, request: Request, *, within_s: float | None = None) -> None:
        """Write a request file. Rank 0 checks for it once a second, the supervisor more often."""
        write_json(self.request, asdict(request) | {"time": time.time()}, within_s=within_s)

    def read_request(self, *, within_s: float | None = None) -> Request | None:
        """Return the request to this attempt, or None.

        A damaged file is a request to stop, because ranks only check whether the file exists.

        Args:
            within_s: how long to retry transient errors, see `retry.retry`.
        """
        if not retry.retry(self.request.exists, self.request, within_s=within_s):
            return None
        try:
            return formats.fill(Request, read_json(self.request, within_s=within_s) or {}, self.request)
        except RunFolderError:
            return Request(cause="user", by="unreadable request file")

    def outcomes(self, *, skip: Container[int] = ()) -> dict[int, dict[str, Any]]:
        """Return the outcome files of the ranks, by rank, without the ranks in `skip`."""
        found = {}
        try:
            names = retry.retry(lambda: os.listdir(self.path), self.path)
        except NotADirectoryError:
            return {}
        matches = [match for name in names if (match := _OUTCOME.fullmatch(name))]
        for rank, name in sorted((int(match[1]), match[0]) for match in matches):
            if rank not in skip and (outcome := read_json(self.path / name)) is not None:
                found[rank] = outcome
        return found


def _is_beat(found: Mapping[str, Any]) -> bool:
    metrics, total = found.get("metrics"), found.get("total_steps", 0)
    return (
        isinstance(metrics, dict)
        and all(type(value) is float or _is_count(value) for value in metrics.values())
        and _is_count(found.get("step"))
        and (total is None or _is_count(total))
        and type(found.get("time")) in (int, float)
        and 0 <= found["time"] <= formats.LARGEST
    )


def _is_count(value: object) -> bool:
    return type(value) is int and abs(value) <= formats.LARGEST
