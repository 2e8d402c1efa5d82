"""A coding agent's session on a CPU: start, watch, stop, resume, compare and explain runs, by commands alone.

It reads exit codes and JSON; docs/how-to/for-agents.md documents them. Runs and a script are written to the current
folder:

    python examples/agent/session.py
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

#: The end does not wait for MLflow; `hpcdist sync` uploads what is left.
QUICK = ("launch.num_ranks=1", "tracking.drain_timeout_s=0")
DIGITS = ("ddp_digits", *QUICK, "tracking.register_as=")
OVER = ("finished", "stopped", "failed", "cancelled", "lost")


def hpcdist(command: str, *words: str, expected: int = 0) -> str:
    """Return the standard output of a command, which must end with the expected exit code."""
    done = subprocess.run(["hpcdist", command, *words], capture_output=True, text=True, check=False)
    if done.returncode != expected:
        raise SystemExit(f"hpcdist {command} {words}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def start(*words: str) -> None:
    """Check a run, then start it in the background. Its `name` makes a second start fail instead of training twice."""
    hpcdist("run", "--dry-run", *words)
    hpcdist("run", "--detach", *words)


def status(name: str) -> dict[str, Any]:
    """Return the status of a run."""
    found: dict[str, Any] = json.loads(hpcdist("status", name, "--json"))
    return found


def watch(name: str, step: int) -> dict[str, Any]:
    """Poll a run until rank 0 has done a step. Returns the status."""
    while True:
        found = status(name)
        if found["ranks"] and found["ranks"][0]["step"] >= step:
            return found
        if found["status"] in OVER:
            raise SystemExit(hpcdist("explain", name))
        time.sleep(2)


def main() -> None:
    # One run, and no second one under its name.
    first = (*DIGITS, "name=first", "stop.max_epochs=200")
    start(*first)
    hpcdist("run", "--detach", *first, expected=2)

    # Stop it with a checkpoint, then continue it with another config.
    watch("first", step=10)
    hpcdist("stop", "first")
    hpcdist("follow", "first")
    stopped = status("first")
    print("stopped:", stopped["reason"], stopped["checkpoints"][-1])
    epochs = int(stopped["ranks"][0]["metrics"]["train/epoch"]) + 1
    hpcdist("resume", "first", "--detach", f"stop.max_epochs={epochs}")
    hpcdist("follow", "first")

    # Change one key and compare.
    start(*DIGITS, "name=second", f"stop.max_epochs={epochs}", "optim.lr=0.01")
    hpcdist("follow", "second")
    found = json.loads(hpcdist("compare", "first", "second", "--json"))
    print("optim.lr:", dict(zip(found["runs"], found["differences"]["config"]["optim.lr"], strict=True)))
    second = next(result for result in found["results"] if result["run"] == "second")
    print("second against first:", second["metric"], second["delta"], second["verdict"])

    # A failure: explain names the fix; then the same run continues with the corrected code.
    script = Path("agent_script.py")
    script.write_text("raise ValueError('bad batch')\n")
    start("name=third", *QUICK, "launch.max_restarts=0", str(script))
    hpcdist("follow", "third", expected=1)
    found = json.loads(hpcdist("explain", "third", "--json"))
    print(f"cause: {found['cause']}", f"fix: {found['fix']}", sep="\n")
    script.write_text("print('good batch')\n")
    hpcdist("resume", "third", "--with-current-code", "--detach")
    hpcdist("follow", "third")

    rows = json.loads(hpcdist("runs", "--json"))["runs"]
    print("runs:", {row["run"]: row["status"] for row in rows})


if __name__ == "__main__":
    main()
