"""A step of the pipeline trainer against the tutorial's RPC pipeline and torch.distributed.pipelining.

    python benchmarks/pipeline.py [--rounds 5] [--splits 1 2 4 8] [--json]

ResNet50 in two stages of one thread each, 32 images of 128², SGD. All contenders are started once and then asked for
one step after the other in turn, so that a neighbour's load meets all of them; who waits for a turn stands still
(SIGSTOP), since TensorPipe and gloo poll while they wait. Ratios are taken within a round, medians over rounds. Ours is
our trainer's own set-up and step in ranks that `hpcdist run` has started, with the allocator's policy; the others run
as published, and the baseline with one split also with that policy.

The bound of N splits is what our two stages can give at best: (N - 1) times the slower one's micro-batch and one of
each, then the slower one's optimizer step. Each stage's time is measured in the same rounds while the other one rests,
at the micro-batch's size: so the bound holds what small micro-batches cost.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import psutil

from hpcdist.supervisor.plan import processor_env
from hpcdist.trainers.pipeline.schedules import ideal_bubble, ideal_step_s

BASELINES = Path(__file__).parent / "baselines"
BATCH_SIZE, IMAGE_SIZE = 32, 128
#: Seconds of the tutorial's own table on two GPUs (1 to 8 splits), for the shape of the curve.
OWN = ("HPCDIST_", "MALLOC_", "OMP_", "MLFLOW_")
MALLOC_ENV = {key: value for key, value in processor_env(1, use_gpus=False).items() if key.startswith("MALLOC_")}


class Contender:
    """Processes that do what a line asks for, and answer with numbers."""

    def __init__(self, name: str, ask: IO[str], answers: IO[str], roots: Sequence[int]) -> None:
        self.name = name
        self._roots = roots  #: process ids; what they have started belongs to the contender as well
        self._ask = ask
        self._answers = answers
        ready = answers.readline()
        if ready.strip() != "ready":
            sys.exit(f"{name} did not start: {ready}{answers.read()}")
        self._signal(signal.SIGSTOP)

    def __call__(self, command: str) -> list[float]:
        self._signal(signal.SIGCONT)
        self._ask.write(f"{command}\n")
        self._ask.flush()
        answer = [float(value) for value in self._answers.readline().split()]
        self._signal(signal.SIGSTOP)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        for root in self._roots:
            for process in (psutil.Process(root), *psutil.Process(root).children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._ask.close()


def start_script(stack: ExitStack, name: str, num_ranks: int, extra_env: dict[str, str]) -> Contender:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pipeline_")))
    env = {k: v for k, v in os.environ.items() if not k.startswith(OWN)}
    env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo", **extra_env}
    processes = []
    for rank in range(num_ranks):
        command = [sys.executable, str(BASELINES / f"{name}.py"), *map(str, (rank, folder, BATCH_SIZE, IMAGE_SIZE))]
        pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(
            subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=(folder / "log").open("w"), text=True)
        )
        stack.callback(processes[-1].kill)
    assert processes[0].stdin is not None
    assert processes[0].stdout is not None
    return Contender(name, processes[0].stdin, processes[0].stdout, [process.pid for process in processes])


def start_ours(stack: ExitStack, *overrides: str) -> Contender:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pipeline_")))
    for pipe in ("commands", "answers"):
        os.mkfifo(folder / pipe)
    env = {k: v for k, v in os.environ.items() if not k.startswith(OWN)}
    command = [sys.executable, "-m", "hpcdist", "run", "pipeline_resnet50", f"runs_dir={folder}", "name=ours"]
    command += [
        "trainer=paced_pipeline:train",
        f"params.commands={folder}/commands",
        f"params.answers={folder}/answers",
    ]
    command += ["data.name=synthetic", f"data.image_size={IMAGE_SIZE}", f"data.batch_size={BATCH_SIZE}"]
    command += ["data.num_samples=64", "optim.name=sgd", "optim.lr=0.05", "launch.device=cpu", "launch.num_threads=1"]
    command += [
        "tracking.system_interval_s=0",
        "pipeline.split_points=[layer2]",
        "pipeline.num_micro_batches=4",
        *overrides,
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=BASELINES, env=env, stdout=log, stderr=log)
    stack.callback(process.terminate)
    ask = stack.enter_context(_open(folder / "commands", "w", process, folder / "log"))
    return Contender("ours", ask, stack.enter_context((folder / "answers").open()), [process.pid])


def _open(path: Path, mode: str, process: subprocess.Popen[bytes], log: Path) -> IO[str]:
    """Open a named pipe once its other end is there; a run that has failed says why."""
    while process.poll() is None:
        try:
            return os.fdopen(os.open(path, os.O_WRONLY | os.O_NONBLOCK), mode)
        except OSError:  # nobody reads yet
            time.sleep(0.1)
    sys.exit(f"our run ended:\n{log.read_text()}")


Times = dict[str, list[list[float]]]


def measure(splits: Sequence[int], rounds: int) -> Times:
    """Answers by `contender command`, a list of rounds each."""
    with ExitStack() as stack:
        contenders = {
            "baseline": start_script(stack, "pipeline", 3, {}),
            "baseline, our MALLOC_*": start_script(stack, "pipeline", 3, MALLOC_ENV),
            "pipelining": start_script(stack, "pipelining", 2, {}),
            "ours": start_ours(stack),
            "ours, engine pipelining": start_ours(stack, "pipeline.engine=pipelining"),
            "ours, without MALLOC_*": start_ours(stack, *(f"launch.env.{key}=''" for key in MALLOC_ENV)),
        }
        plan = [("ours", "update"), ("baseline, our MALLOC_*", "1"), ("ours, without MALLOC_*", f"step {splits[0]}")]
        for split in splits:
            plan += [("baseline", str(split)), ("ours", f"step {split}"), ("pipelining", str(split))]
            plan += [("ours", f"alone {split}"), ("ours", f"together {split}")]
            if split > 1:  # as 1F1B wants it
                plan += [("ours, engine pipelining", f"step {split}")]
        times: Times = {}
        for number in range(rounds + 1):  # the first one is for caches and allocators
            for who, command in plan:
                answer = contenders[who](command)
                if number > 0:
                    times.setdefault(f"{who} {command}", []).append(answer)
            shown = "  ".join(f"{key} {values[-1][0]:.2f}" for key, values in times.items() if "step" in key)
            print(f"round {number}, load {os.getloadavg()[0]:.1f}: {shown}", file=sys.stderr, flush=True)
        for contender in contenders.values():
            contender.close()
    return times


def ratio(times: Times, over: str, under: str) -> float:
    """Median over rounds of one's seconds over another's."""
    return statistics.median(a[0] / b[0] for a, b in zip(times[over], times[under], strict=True))


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def bound_s(times: Times, split: int, what: str = "alone") -> list[float]:
    """The shortest step of each round."""
    updates = [max(update) for update in times["ours update"]]
    parts = times[f"ours {what} {split}"]
    return [ideal_step_s(stage_s, split) + update for stage_s, update in zip(parts, updates, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--splits", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    times = measure(arguments.splits, arguments.rounds)

    print(f"ResNet50, 2 stages x 1 thread, {BATCH_SIZE} images of {IMAGE_SIZE}²; seconds a step, medians of")
    print(f"{arguments.rounds} rounds; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after\n")
    print("splits  baseline  pipelining    ours  ours/pipelining   bound  bound/ours  both busy  bubble ours/theory")
    table = []
    for split in arguments.splits:
        step = f"step {split}"
        ours = median([answer[0] for answer in times[f"ours {step}"]])
        baseline = median([answer[0] for answer in times[f"baseline {split}"]])
        engine = times.get(f"ours, engine pipelining {step}")
        bounds, both = bound_s(times, split), bound_s(times, split, "together")
        of_bound = median([bound / answer[0] for bound, answer in zip(bounds, times[f"ours {step}"], strict=True)])
        work = [sum(answer) * split for answer in times[f"ours alone {split}"]]
        bubble = median([1 - all_s / (2 * a[0]) for all_s, a in zip(work, times[f"ours {step}"], strict=True)])
        print(
            f"{split:6}{baseline:10.2f}{median([a[0] for a in times[f'pipelining {split}']]):12.2f}{ours:8.2f}"
            f"{median([a[0] for a in engine]) if engine else float('nan'):17.2f}{median(bounds):8.2f}{of_bound:12.2f}"
            f"{median(both):11.2f}{bubble:12.2f} / {ideal_bubble(2, split):.2f}"
        )
        row = {"unit": "batches/s", "baseline": 1 / baseline, "ours": 1 / ours}
        best = median([a[0] / bound for a, bound in zip(times[f"baseline {split}"], bounds, strict=True)])
        over = ratio(times, f"baseline {split}", f"ours {step}")
        goal = 0.9 * best if split > 1 else 1.0
        table.append({"case": f"{split} splits", **row, "ratio": over, "bound": best, "goal": max(1.0, goal)})
        other = 1 / median([a[0] for a in times[f"pipelining {split}"]])
        over = ratio(times, f"pipelining {split}", f"ours {step}")
        case = f"{split} splits, over torch.distributed.pipelining"
        table.append({"case": case, **row, "baseline": other, "ratio": over, "bound": None, "goal": 1.0})
    one = "baseline 1"
    policy = ratio(times, one, "baseline, our MALLOC_* 1")
    first = f"step {arguments.splits[0]}"
    ours_policy = ratio(times, f"ours, without MALLOC_* {first}", f"ours {first}")
    print(f"\nthe allocator's policy makes the baseline {policy:.2f} times as fast, and ours {ours_policy:.2f} times")
    print("over the baseline with 1 split:")
    for split in arguments.splits:
        published, ours_over = ratio(times, one, f"baseline {split}"), ratio(times, one, f"ours step {split}")
        print(f"{split:4} splits: baseline {published:.2f}, ours {ours_over:.2f}")
    best_split = max(arguments.splits, key=lambda split: ratio(times, one, f"ours step {split}"))
    row = {"unit": "batches/s", "baseline": 1 / median([a[0] for a in times[one]])}
    ours = median([a[0] for a in times[f"ours step {best_split}"]])
    over = ratio(times, one, f"ours step {best_split}")
    case = f"{best_split} splits, over the baseline with 1"
    table.append({"case": case, **row, "ours": 1 / ours, "ratio": over, "bound": None, "goal": 1.9})
    if arguments.json:
        print(json.dumps({"benchmark": "pipeline", "rounds": arguments.rounds, "times": times, "table": table}))


if __name__ == "__main__":
    main()
