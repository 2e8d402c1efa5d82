"""Duration of a pipeline step: the PyTorch tutorial's RPC pipeline, torch.distributed.pipelining, hpcdist.

    python benchmarks/pipeline.py [--rounds 5] [--splits 1 2 4 8] [--image-size 128] [--without-allocator] [--json]

ResNet50 in two stages of one thread each, batches of 32 images, SGD. All contenders are started once and do one step in
turn, so that other load affects all of them; meanwhile the others are stopped by SIGSTOP, because TensorPipe and gloo
poll while they wait. Ratios are computed within each round; the results are medians over rounds. hpcdist is the
trainer's own set-up and step in ranks of `hpcdist run`, with its allocator settings. The others run as published, and
the baseline with one split also runs with these settings.

The bound for N splits is the shortest step that the two stages of hpcdist allow: N - 1 times the micro-batch of the
slower stage, one micro-batch of each stage, and the optimizer step of the slower stage. Each stage is measured at
this micro-batch size in the same rounds while the other is idle, so the bound includes the cost of small batches.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import IO, Any

from harness import BASELINES, HPCDIST, MALLOC_ENV, argument_parser, clean_env, median_ratio, signal_tree

from hpcdist.trainers.pipeline.engine import ideal_bubble

BATCH_SIZE = 32


class Contender:
    """Processes that read a command per line and write numbers as the response."""

    def __init__(self, name: str, commands: IO[str], responses: IO[str], pids: Sequence[int]) -> None:
        self.name = name
        self._pids = pids
        self._commands = commands
        self._responses = responses
        ready = responses.readline()
        if ready.strip() != "ready":
            sys.exit(f"{name} did not start: {ready}{responses.read()}")
        self._signal(signal.SIGSTOP)

    def __call__(self, command: str) -> list[float]:
        """Let the processes run until they have executed a command."""
        self._signal(signal.SIGCONT)
        self._commands.write(f"{command}\n")
        self._commands.flush()
        response = [float(value) for value in self._responses.readline().split()]
        self._signal(signal.SIGSTOP)
        return response

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            signal_tree(pid, number)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._commands.close()


def new_folder(stack: ExitStack) -> Path:
    """Return a folder that is removed at the end, also if killed processes leave files in it meanwhile."""
    folder = tempfile.TemporaryDirectory(prefix="pipeline_", ignore_cleanup_errors=True)
    return Path(stack.enter_context(folder))


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a process and its descendants, which may be stopped."""
    signal_tree(process.pid, signal.SIGKILL)
    process.wait()


def start_script(stack: ExitStack, name: str, image_size: int, num_ranks: int, extra_env: dict[str, str]) -> Contender:
    folder = new_folder(stack)
    env = clean_env() | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo", **extra_env}
    processes = []
    for rank in range(num_ranks):
        command = [sys.executable, str(BASELINES / f"{name}.py"), *map(str, (rank, folder, BATCH_SIZE, image_size))]
        pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(
            subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=(folder / "log").open("w"), text=True)
        )
        stack.callback(kill, processes[-1])
    assert processes[0].stdin is not None
    assert processes[0].stdout is not None
    return Contender(name, processes[0].stdin, processes[0].stdout, [process.pid for process in processes])


def start_ours(stack: ExitStack, image_size: int, *overrides: str) -> Contender:
    folder = new_folder(stack)
    for pipe in ("commands", "answers"):
        os.mkfifo(folder / pipe)
    command = [*HPCDIST, "run", "pipeline_resnet50", f"runs_dir={folder}", "name=ours"]
    command += [
        "trainer=paced_pipeline:train",
        f"params.commands={folder}/commands",
        f"params.answers={folder}/answers",
    ]
    command += ["data.name=synthetic", f"data.image_size={image_size}", f"data.batch_size={BATCH_SIZE}"]
    command += ["data.num_samples=64", "optim.name=sgd", "optim.lr=0.05", "launch.device=cpu", "launch.num_threads=1"]
    command += [
        "tracking.system_interval_s=0",
        "pipeline.split_points=[layer2]",
        "pipeline.num_micro_batches=4",
        *overrides,
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=BASELINES, env=clean_env(), stdout=log, stderr=log)
    stack.callback(kill, process)
    commands = stack.enter_context(_open_for_writing(folder / "commands", process, folder / "log"))
    return Contender("ours", commands, stack.enter_context((folder / "answers").open()), [process.pid])


def _open_for_writing(path: Path, process: subprocess.Popen[bytes], log: Path) -> IO[str]:
    """Open a named pipe as soon as the run reads from it; a run that fails ends the benchmark with its log."""
    while process.poll() is None:
        try:
            return os.fdopen(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "w")
        except OSError:  # the run has not opened the pipe yet
            time.sleep(0.1)
    sys.exit(f"the run of hpcdist ended:\n{log.read_text()}")


Times = dict[str, list[list[float]]]


def measure(splits: Sequence[int], image_size: int, rounds: int, *, allocator: bool) -> Times:
    """Return the responses by `contender command` and round.

    Args:
        allocator: whether to measure the effect of the allocator settings, too.
    """
    with ExitStack() as stack:
        contenders = {
            "baseline": start_script(stack, "pipeline", image_size, 3, {}),
            "pipelining": start_script(stack, "pipelining", image_size, 2, {}),
            "ours": start_ours(stack, image_size),
        }
        plan = [("ours", "update")]
        if allocator:
            without = [f"launch.env.{key}=''" for key in MALLOC_ENV]
            contenders["baseline, our MALLOC_*"] = start_script(stack, "pipeline", image_size, 3, MALLOC_ENV)
            contenders["ours, without MALLOC_*"] = start_ours(stack, image_size, *without)
            plan += [("baseline, our MALLOC_*", "1"), ("ours, without MALLOC_*", f"step {splits[0]}")]
        for split in splits:
            plan += [("baseline", str(split)), ("ours", f"step {split}"), ("pipelining", str(split))]
            plan += [("ours", f"alone {split}"), ("ours", f"together {split}")]
        times: Times = {}
        for number in range(rounds + 1):  # the first round fills caches and allocators
            for name, command in plan:
                response = contenders[name](command)
                if number > 0:
                    times.setdefault(f"{name} {command}", []).append(response)
            shown = "  ".join(f"{key} {values[-1][0]:.2f}" for key, values in times.items() if "step" in key)
            print(f"round {number}, load {os.getloadavg()[0]:.1f}: {shown}", file=sys.stderr, flush=True)
        for contender in contenders.values():
            contender.close()
    return times


def ratio(times: Times, over: str, under: str) -> float:
    """Return the median over rounds of the ratio of two durations."""
    return median_ratio(first_values(times[over]), first_values(times[under]))


def first_values(responses: Sequence[Sequence[float]]) -> list[float]:
    return [response[0] for response in responses]


def bound_s(times: Times, split: int, measurement: str = "alone") -> list[float]:
    """Return the shortest possible step of each round."""
    updates = [max(update) for update in times["ours update"]]
    parts = times[f"ours {measurement} {split}"]
    # The slowest stage is never idle after its first micro-batch.
    return [sum(stage_s) + (split - 1) * max(stage_s) + update for stage_s, update in zip(parts, updates, strict=True)]


def split_rows(times: Times, split: int) -> Iterator[dict[str, Any]]:
    """Print the line of one number of splits and yield its rows of the table of trainers."""
    step = f"ours step {split}"
    ours, baseline, pipelining = (
        median(first_values(times[key])) for key in (step, f"baseline {split}", f"pipelining {split}")
    )
    bounds, both = bound_s(times, split), bound_s(times, split, "together")
    of_bound = median_ratio(bounds, first_values(times[step]))
    work = [sum(response) * split for response in times[f"ours alone {split}"]]
    bubble = 1 - median_ratio(work, first_values(times[step])) / 2
    print(
        f"{split:6}{baseline:10.2f}{pipelining:12.2f}{ours:8.2f}{median(bounds):8.2f}"
        f"{of_bound:12.2f}{median(both):11.2f}{bubble:12.2f} / {ideal_bubble(2, split):.2f}"
    )
    bound = median_ratio(first_values(times[f"baseline {split}"]), bounds)
    row = {"unit": "batches/s", "ours": 1 / ours}
    yield {
        "case": f"{split} splits",
        **row,
        "baseline": 1 / baseline,
        "ratio": ratio(times, f"baseline {split}", step),
        "bound": bound,
        "goal": max(1.0, 0.9 * bound) if split > 1 else 1.0,
    }
    yield {
        "case": f"{split} splits, over torch.distributed.pipelining",
        **row,
        "baseline": 1 / pipelining,
        "ratio": ratio(times, f"pipelining {split}", step),
        "bound": None,
        "goal": 1.0,
    }


def best_row(times: Times, splits: Sequence[int]) -> dict[str, Any]:
    """Return the row of the best number of splits, compared with the baseline with one split."""
    over = {split: ratio(times, "baseline 1", f"ours step {split}") for split in splits}
    best = max(splits, key=over.__getitem__)
    return {
        "case": f"{best} splits, over the baseline with 1",
        "unit": "batches/s",
        "baseline": 1 / median(first_values(times["baseline 1"])),
        "ours": 1 / median(first_values(times[f"ours step {best}"])),
        "ratio": over[best],
        "bound": None,
        "goal": 1.9,
    }


def main() -> None:
    parser = argument_parser(__doc__, rounds=5)
    parser.add_argument("--splits", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument(
        "--without-allocator", action="store_true", help="do not measure the effect of the allocator settings"
    )
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    allocator = not arguments.without_allocator
    times = measure(arguments.splits, arguments.image_size, arguments.rounds, allocator=allocator)

    print(
        f"ResNet50, 2 stages x 1 thread, {BATCH_SIZE} images of {arguments.image_size}²; seconds per step, medians of"
    )
    print(f"{arguments.rounds} rounds; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after\n")
    print("splits  baseline  pipelining    ours   bound  bound/ours  both busy  bubble ours/theory")
    table = [row for split in arguments.splits for row in split_rows(times, split)]
    print()
    if allocator:
        first = f"step {arguments.splits[0]}"
        for_baseline = ratio(times, "baseline 1", "baseline, our MALLOC_* 1")
        for_ours = ratio(times, f"ours, without MALLOC_* {first}", f"ours {first}")
        print(f"speed-up by the allocator settings: baseline {for_baseline:.2f}, ours {for_ours:.2f}")
    print("speed-up over the baseline with 1 split:")
    for split in arguments.splits:
        published = ratio(times, "baseline 1", f"baseline {split}")
        ours = ratio(times, "baseline 1", f"ours step {split}")
        print(f"{split:4} splits: baseline {published:.2f}, ours {ours:.2f}")
    table.append(best_row(times, arguments.splits))
    if arguments.json:
        print(json.dumps({"benchmark": "pipeline", "rounds": arguments.rounds, "times": times, "table": table}))


if __name__ == "__main__":
    main()
