"""A fake rank: writes the files of a worker, without torch, trainer or import of hpcdist.

    python fake_rank.py RUN_DIR

`RUN_DIR/script.json` has the actions of each rank in each attempt: `{"<attempt>.<rank>": [[verb, argument], …]}`.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RUN = Path(sys.argv[1]) if __name__ == "__main__" else Path()
RANK = int(os.environ.get("HPCDIST_RANK", "0"))
ATTEMPT = int(os.environ.get("HPCDIST_ATTEMPT", "1"))
FOLDER = RUN / "attempts" / f"{ATTEMPT:03d}"
STEP = 0


def beat(step: int) -> None:
    """Write a heartbeat, as rank/telemetry.py does."""
    global STEP
    STEP = step
    value = {"time": time.time(), "step": step, "total_steps": 100, "metrics": {"train/loss": 1 / (step + 1)}}
    temporary = FOLDER / f".beat-{RANK}"
    temporary.write_text(json.dumps(value))
    temporary.replace(FOLDER / f"rank-{RANK:05d}.beat.json")


def report(outcome: dict[str, Any]) -> None:
    """Write the outcome file, as rank/worker.py does."""
    value = {"rank": RANK, "host": "fakehost", "time": time.time(), "step": STEP, "peer_lost": False, "traceback": []}
    (FOLDER / f"rank-{RANK:05d}.outcome.json").write_text(json.dumps(value | outcome))


def await_file(name: str) -> None:
    """Wait until a file exists."""
    while not (RUN / name).exists():
        select.select([], [], [], 0.01)


def perform(verb: str, argument: Any) -> None:
    if verb == "beat":
        beat(argument)
    elif verb == "report":
        report(argument)
    elif verb == "print":
        print(argument, flush=True)
    elif verb == "await":
        await_file(argument.format(attempt=FOLDER.relative_to(RUN)))
    elif verb == "ignore":
        signal.signal(argument, signal.SIG_IGN)
    elif verb == "grandchild":  # keeps the pipe open until it ends
        stubborn = "trap '' TERM INT HUP; exec sleep 600"
        subprocess.Popen(["sh", "-c", stubborn], pass_fds=[os.open(RUN / "alive", os.O_WRONLY)])
    elif verb == "forever":
        while True:
            signal.pause()
    elif verb == "touch":
        (RUN / argument).touch()
    elif verb == "ask":
        temporary = FOLDER / f".request-{RANK}"
        temporary.write_text(json.dumps({"action": argument, "cause": "user", "by": "a rank"}))
        temporary.replace(FOLDER / "request.json")
    elif verb == "environment":
        print("\n".join(f"{name}={value}" for name, value in os.environ.items()), flush=True)
    elif verb == "block":
        signal.pthread_sigmask(signal.SIG_BLOCK, [argument])
    elif verb == "await_signal":  # a blocked signal
        signal.sigwait([argument])
    elif verb == "sleep":
        select.select([], [], [], argument)
    elif verb == "exit":
        os._exit(argument)
    else:
        raise ValueError(verb)


if __name__ == "__main__":
    for verb, argument in json.loads((RUN / "script.json").read_text())[f"{ATTEMPT}.{RANK}"]:
        perform(verb, argument)
