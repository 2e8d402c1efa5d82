"""All checks and benchmarks of a GPU machine, in order of worth, within a time budget.

    bash benchmarks/gpu.sh                              one GPU, 30 minutes, results in gpu-results/
    bash benchmarks/gpu.sh --minutes 10 --results DIR   continues: stages with a result in DIR are not run again
    bash benchmarks/gpu.sh --device cpu                 rehearsal on a machine without a GPU, in small sizes
    bash benchmarks/gpu.sh --list                       the stages

Each stage is a process with a time limit, its log is `<stage>.log`, and its result is written to `<stage>.json` when it
ends, so an interrupted session keeps what it has measured. A stage that fails, or whose packages are missing, does not
stop the others. `summary.md` has the figures, with the device and their targets. Nothing is installed or downloaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu_stages import STAGES, Stage, rows

CHECKOUT = Path(__file__).resolve().parents[1]
#: A stage is not started with less of the budget than this.
SHORTEST_S = 20.0
#: The limits are for a GPU; a rehearsal may take this many times as long.
REHEARSAL = 4


def missing_packages(stage: Stage) -> list[str]:
    """Return the modules that a stage imports and this Python does not have."""
    return [name for name in stage.needs if importlib.util.find_spec(name) is None]


def run_stage(stage: Stage, device: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run a stage and return its result: status, seconds, figures and, unless it passed, the reason."""
    if missing := missing_packages(stage):
        return {"status": "not run", "reason": f"not installed: {', '.join(missing)}"}
    log = folder / f"{stage.name}.log"
    command = [sys.executable, *stage.command(device, folder)]
    began = time.monotonic()
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, cwd=CHECKOUT, env=stage_env(device), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    result: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "command": command[1:]}
    lines = log.read_text(errors="replace").splitlines()
    result["figures"] = figures(lines)
    if code is None:
        return {**result, "status": "time limit", "reason": f"stopped after {limit_s:.0f} s"}
    if code:
        return {**result, "status": "failed", "reason": last_line(lines) or f"exit code {code}"}
    return {**result, "status": "ok"}


def stage_env(device: str) -> dict[str, str]:
    """Return the environment of a stage: the checkout's code, and no GPU in a rehearsal."""
    path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    return {**env, "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else env


def figures(lines: Sequence[str]) -> dict[str, Any]:
    """Return the union of the JSON objects in a log; stages print one per line, as soon as a part is measured."""
    found: dict[str, Any] = {}
    for line in lines:
        with suppress(json.JSONDecodeError):
            value = json.loads(line) if line.startswith("{") else None
            found |= value if isinstance(value, dict) else {}
    return found


def last_line(lines: Sequence[str]) -> str:
    """Return the last line that is not JSON, shortened."""
    text = next((line.strip() for line in reversed(lines) if line.strip() and not line.startswith("{")), "")
    return text[:300]


def write(path: Path, text: str) -> None:
    """Replace a file, so that an interruption leaves the old or the new content."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.rename(path)


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results of earlier sessions in this folder, by stage."""
    found = {}
    for stage in STAGES:
        with suppress(FileNotFoundError, json.JSONDecodeError):
            found[stage.name] = json.loads((folder / f"{stage.name}.json").read_text())
    return found


def summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the figures and the outcome of every stage as Markdown."""
    facts = results.get("facts", {}).get("figures", {})
    names = ("gpu", "driver", "torch", "cuda", "nccl", "cores", "date")
    head = ", ".join(f"{name} {facts[name]}" for name in names if name in facts)
    lines = [head or "no facts of the machine", "", "| stage | outcome | s | figure | measured | target or published |"]
    lines.append("|---|---|---|---|---|---|")
    for stage in STAGES:
        result = results.get(stage.name, {"status": "not run", "reason": "no time left"})
        outcome = result["status"] + (f": {result['reason']}" if "reason" in result else "")
        first = f"| {stage.name} | {outcome.replace('|', '/')} | {result.get('seconds', '')} |"
        for number, (name, value, target) in enumerate(rows(stage.name, result.get("figures", {})) or [("", "", "")]):
            lines.append(f"{first if number == 0 else '| | | |'} {name} | {value} | {target} |")
    return "\n".join(lines) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=30.0, help="time budget (default: 30)")
    parser.add_argument("--results", type=Path, metavar="DIR", help="default: gpu-results, or cpu-results with cpu")
    parser.add_argument("--only", default="", metavar="STAGE,…", help="run these stages, also again")
    parser.add_argument("--list", action="store_true", help="list the stages")
    arguments = parser.parse_args()
    unknown = {*filter(None, arguments.only.split(","))} - {stage.name for stage in STAGES}
    if unknown:
        parser.error(f"--only: unknown stages {', '.join(sorted(unknown))}; --list shows all")
    # A GPU session must not take the results of a rehearsal for its own.
    arguments.results = arguments.results or CHECKOUT / ("gpu-results" if arguments.device == "cuda" else "cpu-results")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.list:
        for stage in STAGES:
            print(f"{stage.name:12}{stage.limit_s:5.0f} s  {stage.purpose}")
        return 0
    # A session that is stopped ends its stage as well.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    end = time.monotonic() + 60 * arguments.minutes
    folder: Path = arguments.results.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [*filter(None, arguments.only.split(","))]
    results = read_results(folder)
    for stage in STAGES:
        done = results.get(stage.name, {}).get("status") == "ok"
        if (stage.name not in wanted) if wanted else done:
            continue
        limit_s = min(stage.limit_s * (REHEARSAL if arguments.device == "cpu" else 1), end - time.monotonic())
        if limit_s < min(SHORTEST_S, stage.limit_s):
            print(f"{stage.name}: no time left", flush=True)
            continue
        print(f"{stage.name}: {stage.purpose} …", flush=True)
        results[stage.name] = run_stage(stage, arguments.device, folder, limit_s)
        write(folder / f"{stage.name}.json", json.dumps(results[stage.name], indent=1) + "\n")
        write(folder / "summary.md", summary(results))
        shown = {key: value for key, value in results[stage.name].items() if key not in ("command", "figures")}
        print(f"    {json.dumps(shown)}", flush=True)
    print(summary(results), end="")
    return int(any(result["status"] in ("failed", "time limit") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
