"""Generator of the benchmarks' answers, with figures, dates and commands of benchmarks/RESULTS.md."""

from __future__ import annotations

import re

from generators.tables import ROOT, cell, code, table

#: Question, answer, script. `{}` in an answer is a measured figure: the next pattern matches its name in RESULTS.md.
QUESTIONS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    (
        "How long from SIGKILL of a rank to the next step?",
        "{}; torchrun {}",
        (r"SIGKILL of a rank to the next step, 10 MB", r"SIGKILL of a rank to the next step: torchrun"),
        "recovery",
    ),
    (
        "The same in a Slurm job?",
        "{}, {} of the time with `launch.fork=false`",
        (r"SIGKILL of a rank to the next step in a job, forked", r"the same: forked over each rank imports"),
        "slurm_recovery",
    ),
    (
        "How many useful steps does a training do if its ranks are killed at random?",
        "torchrun with `torch.save` does {} of hpcdist's, Lightning {}",
        (r"useful steps/s with kills: torchrun.*", r"useful steps/s with kills: Lightning.*"),
        "goodput",
    ),
    (
        "How long does the start of 8 ranks take?",
        "{} of torchrun's time, an unchanged script {}; 2 ranks: {}, {}",
        tuple(
            f"command to first step{ranks}: {who} over torchrun"
            for ranks in (", 8 ranks", "")
            for who in ("trainer", "unchanged script")
        ),
        "startup",
    ),
    (
        "How many files does each rank open at its start?",
        "{}; {} if each rank imports torch",
        (r"files that a rank opens at its start, forked", r"files that a rank opens at its start, each rank imports"),
        "start_calls",
    ),
    (
        "How long from submission to the first step?",
        "{} of a hand-written batch script's time",
        (r"submit on a login node, over sbatch",),
        "slurm_start",
    ),
    (
        "How long is a DDP step?",
        "batch 8: {} of a bare loop, Accelerate {}, Lightning {}; batch 64: {}, {}, {}",
        tuple(
            f"training step, batch {batch}: {who}"
            for batch in (8, 64)
            for who in ("hpcdist over bare DDP", "accelerate", "lightning")
        ),
        "ddp_step",
    ),
    (
        "How long does a checkpoint stop training?",
        "{} of `torch.save`",
        (r"checkpoint stall over torch.save",),
        "checkpoint_stall",
    ),
    (
        "The same for a model that FSDP2 shards?",
        "{} of `dcp.save`, {} of `dcp.async_save`; on disk after {} of the time of `dcp.save`",
        (
            r"FSDP2 state: stall over `dcp.save`",
            r"FSDP2 state: stall over `dcp.async_save`",
            r"FSDP2 state: time until durable over `dcp.save`",
        ),
        "sharded_checkpoint",
    ),
    (
        "How much processor time does a token of the trainer lm take?",
        "{} of a bare FSDP2 loop, {} of Lightning Fabric, {} of a loop that also keeps gathered weights",
        (
            r"trainer `lm`: CPU time of a token over a bare FSDP2 loop",
            r"trainer `lm`: CPU time of a token over Lightning Fabric",
            r"trainer `lm`: CPU time of a token over a bare FSDP2 loop that keeps gathered weights, as it does",
        ),
        "lm",
    ),
    (
        "How long does the order of 10^9 windows of text take?",
        "{} of CPU time for each window that is read, without memory",
        (r"order of 10\^9 windows of tokens, CPU time per window",),
        "token_windows",
    ),
    (
        "How long does logging a metric take?",
        "{}; MLflow's client {}, to a server {}, asynchronous {}",
        (
            r"journal record of one metric",
            r"MLflow's `log_metric`, sqlite",
            r"MLflow's `log_metric`, server",
            r"MLflow's asynchronous `log_batch`, server",
        ),
        "log_record",
    ),
    ("How much does step timing add to a step?", "{}", (r"step timer, share of a DDP step at batch 8.*",), "timing"),
    (
        "How much load do 4,096 simulated ranks make?",
        "supervisor {} of a core, file system {}",
        (r"4,096 simulated ranks: supervisor.*", r"4,096 simulated ranks: file-system calls"),
        "scale",
    ),
    (
        "How much does forking a rank cost?",
        "{} of CPU time; its parent {} of memory",
        (r"CPU time of forking a rank", r"memory of the process that forks ranks.*"),
        "fork_cost",
    ),
    *(
        (f"How fast is the trainer {trainer}?", "{} the PyTorch tutorial's code", (f"{trainer}: {case}",), trainer)
        for trainer, case in (
            ("pipeline", "2 splits"),
            ("rl", "64 environments"),
            ("rnn", r"10,000 × 200, batch 20 × 35: ours"),
            ("hybrid", r"1,000,000 × 64, .*"),
        )
    ),
)


def answers() -> str:
    """Return a row for each question. Raises KeyError for a figure or script that RESULTS.md does not have."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    rows = [[part.strip() for part in line.strip("| ").split(" | ")] for line in text.splitlines() if line[:2] == "| "]
    rows.reverse()  # of the rows of one figure on several machines, the first one is the newest
    figures = {row[0]: row[1] for row in rows if len(row) < 7}
    figures |= {f"{row[0]}: {row[1]}": row[4] for row in rows if len(row) >= 7}
    runs = {name: (command, date) for name, command, date in re.findall(r"^## (\w+)\n\n`(.+?)`, (\S+)", text, re.M)}

    def figure(pattern: str) -> str:
        found = [value for name, value in figures.items() if re.fullmatch(pattern, name)]
        if len(found) != 1:
            raise KeyError(f"benchmarks/RESULTS.md has {len(found)} figures named {pattern}")
        return re.sub(r"[\d.]+e\+\d+", lambda number: f"{float(number[0]):,.0f}", found[0])

    head = ("question", "answer", "command", "date")
    return table(
        head,
        (
            (question, cell(answer.format(*map(figure, patterns))), code(runs[script][0]), runs[script][1])
            for question, answer, patterns, script in QUESTIONS
        ),
    )
