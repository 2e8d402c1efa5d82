"""Speed of the trainer lm with 1.1 B parameters on one GPU, over a plain loop, and the stall of a checkpoint.

    PYTHONPATH=. python benchmarks/gpu_lm.py cuda|cpu [stall]

The trainer is `hpcdist run lm_1b` with one pass per step, on the bytes of Python's standard library; the plain loop,
under autocast, is `baselines/plain_lm.py`. Tokens per second, MFU (over the FLOPs of the data sheet, and over those of
a product of matrices) and memory are the run's own metrics: medians over the logged intervals, of which the first one,
which includes compilation, does not count.

With `stall`, the trainer saves model and optimizer (13 GB) three times instead, and the plain loop once by
`torch.save`. The stall of a save is the time in which the call holds the training, which the run records; the first
save allocates the host memory. `slowed_s` is by how much the steps after a save are slower, since the GPU also copies.
Prints one JSON object per line, as soon as a figure is known. On a CPU everything is small, to try the program.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import BASELINES, HPCDIST

from hpcdist.checkpoint.store import CheckpointStore
from hpcdist.config.loading import load_config
from hpcdist.data import NUM_BYTE_TOKENS
from hpcdist.host.json_files import read_json_lines
from hpcdist.run.folder import RunDir
from hpcdist.tracking.journal import read_records
from hpcdist.trainers.lm import LmConfig

CONFIG = "lm_1b"
#: Bytes need no training of a tokenizer; the embedding keeps the rows of the config's.
SETTINGS = (
    *("lm.corpus.tokenizer=byte", "lm.model.vocab_size=32768", "data.global_batch_size=8", "lm.num_eval_windows=8"),
    *("launch.num_ranks=1", "launch.max_restarts=0", "tracking.uri=''"),
)
#: Further settings for a CPU.
SMALL = (
    *("lm.model.hidden_size=64", "lm.model.num_layers=2", "lm.model.num_heads=4", "lm.model.num_kv_heads=2"),
    *("lm.model.intermediate_size=128", "lm.model.vocab_size=512", "lm.sequence_length=16", "model.compile=false"),
    *("data.global_batch_size=2", "lm.num_eval_windows=2", "tracking.log_every_steps=2"),
)
NUM_STEPS = {"cuda": 60, "cpu": 6}
#: Steps between two saves: on a GPU long enough for a checkpoint to be durable before the next save.
STEPS_PER_SAVE = {"cuda": 150, "cpu": 4}
NUM_SAVES = 3


def say(**figures: object) -> None:
    """Print figures as one line of JSON; numbers with four digits."""
    shown: dict[str, Any] = {}
    for name, value in figures.items():
        shown[name] = value
        if isinstance(value, float):
            shown[name] = float(f"{value:.4g}")
    print(json.dumps(shown), flush=True)


def train(settings: list[str], folder: Path) -> RunDir:
    """Run the trainer and return its run; a failure ends the benchmark."""
    places = [f"runs_dir={folder}/runs", f"data.root={folder}/data", "experiment=gpu_lm", "name=run"]
    subprocess.run([*HPCDIST, "run", CONFIG, *settings, *places], check=True)
    return RunDir(folder / "runs" / "gpu_lm" / "run")


def plain(settings: list[str], *options: str) -> dict[str, float]:
    """Run the plain loop and return its figures."""
    command = [sys.executable, str(BASELINES / "plain_lm.py"), *options, CONFIG, *settings]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def logged(run: RunDir) -> dict[str, dict[int, float]]:
    """Return the metrics of a run by name and step."""
    records, _ = read_records(run.journal / "attempt-001.rank-00000.jsonl")
    values: dict[str, dict[int, float]] = {}
    for record in records:
        for name, value in record.metrics.items():
            values.setdefault(name, {})[record.step] = value
    return values


def usual(values: dict[int, float]) -> float:
    """Return the median over the intervals, without the first one."""
    return statistics.median(list(values.values())[1:])


def speed(settings: list[str], folder: Path) -> None:
    """Print the figures of the trainer and of the plain loop."""
    metrics = logged(train(settings, folder))
    lm = load_config(CONFIG, settings).section(LmConfig)
    vocab_size = lm.model.padded_vocab_size(NUM_BYTE_TOKENS)
    tflops_per_token = lm.model.flops_per_token(vocab_size, lm.sequence_length) / 1e12
    rate = usual(metrics["train/tokens_per_s"])
    of_matmul = usual(metrics["train/mfu_of_matmul"])
    figures = {"tokens_per_s": rate, "model_tflops": rate * tflops_per_token, "mfu_of_matmul": of_matmul}
    for name, metric in (("mfu", "train/mfu"), ("memory_gb", "train/memory_peak_gb")):
        if metric in metrics:  # on a known GPU
            figures[name] = usual(metrics[metric])
    say(matmul_tflops=rate * tflops_per_token / of_matmul)
    say(parameters=lm.model.num_parameters(vocab_size), **figures)
    plain_figures = plain(settings)
    plain_rate = plain_figures["plain_tokens_per_s"]
    for name in ("model_tflops", "mfu_of_matmul", "mfu"):
        if name in figures:
            plain_figures[f"plain_{name}"] = figures[name] * plain_rate / rate
    say(**plain_figures, fsdp2_over_plain=rate / plain_rate)


def stall(settings: list[str], folder: Path, steps_per_save: int) -> None:
    """Print how long saves of the trainer, and of `torch.save`, hold the training."""
    saving = [f"checkpoint.every_steps={steps_per_save}", f"stop.max_steps={NUM_SAVES * steps_per_save}"]
    run = train([*settings, *saving], folder)
    saves = [phase for phase in read_json_lines(run.attempt(1).phases) if phase["cause"] == "checkpoint"]
    newest = CheckpointStore(run.checkpoints).all()[0]
    for number, save in enumerate(saves, start=1):
        say(**{f"save_{number}_s": save["ended"] - save["began"]})
    seconds = saves[-1]["ended"] - saves[-1]["began"]
    say(until_durable_s=newest.created - saves[-1]["began"], slowed_s=slowed_s(settings, logged(run), steps_per_save))
    torch_seconds = plain(settings, "--save", str(folder))["torch_save_s"]
    say(torch_save_s=torch_seconds, over_torch_save=seconds / torch_seconds)


def slowed_s(settings: list[str], metrics: dict[str, dict[int, float]], steps_per_save: int) -> float:
    """Return by how many seconds the steps after the second save were slower, until the next logged step."""
    cfg = load_config(CONFIG, settings)
    log_every = cfg.tracking.log_every_steps
    num_tokens = log_every * (cfg.data.global_batch_size or 1) * cfg.section(LmConfig).sequence_length
    rates = metrics["train/tokens_per_s"]
    return num_tokens / rates[2 * steps_per_save + log_every] - num_tokens / usual(rates)


def main() -> None:
    device = sys.argv[1]
    settings = [*SETTINGS, f"launch.device={device}", f"stop.max_steps={NUM_STEPS[device]}"]
    if device == "cpu":
        settings += SMALL
    with tempfile.TemporaryDirectory(prefix="gpu_lm-") as name:
        if "stall" in sys.argv:
            stall(settings, Path(name), STEPS_PER_SAVE[device])
        else:
            speed(settings, Path(name))


if __name__ == "__main__":
    main()
