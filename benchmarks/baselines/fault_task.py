"""Settings and marks of the training of `goodput.py` and `recovery.py`, equal for all contenders."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

#: Limit of torchrun's contenders for a rendezvous and for a collective.
RENDEZVOUS_TIMEOUT = timedelta(seconds=30)


class Marks:
    """Appends the times of events to a file that all ranks and restarts share."""

    def __init__(self, path: Path, rank: int) -> None:
        self._rank = rank
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def add(self, event: str, step: int = 0, value: float = 0.0) -> None:
        """Record an event, such as `step`, with the number of steps done."""
        line = [event, self._rank, os.getpid(), step, time.time(), value]
        os.write(self._file, (json.dumps(line) + "\n").encode())


@dataclass(frozen=True, kw_only=True)
class Task:
    """Settings of the training."""

    folder: str  #: for marks and the checkpoints of scripts
    model: str  #: `cnn`, or `mlp` with 10 MB of parameters
    data: str  #: data.name
    root: str  #: data.root
    steps: int
    save_every: int  #: steps between checkpoints
    eval_every: int = 0  #: steps between evaluations; 0 for none
    batch_size: int = 64  #: per rank

    @classmethod
    def read(cls, path: str) -> Task:
        return cls(**json.loads(Path(path).read_text()))

    def write(self) -> Path:
        """Write the settings into the folder and return the path."""
        path = Path(self.folder) / "task.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    def marks(self, rank: int) -> Marks:
        return Marks(Path(self.folder) / "marks.jsonl", rank)
