"""Tokens of a language model: CPU time of the order and of reading windows, and of building the tokens of a text.

    OMP_NUM_THREADS=1 python benchmarks/token_windows.py [--rounds 5] [--json]

The text is the source of Python's standard library. `tokenizers alone` encodes the same documents from memory, and
keeps the tokens as arrays; the build also reads and checks the files, and writes the tokens. The two alternate.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["RAYON_NUM_THREADS"] = "1"  # of the package tokenizers

import numpy as np
from harness import argument_parser, median

from hpcdist.data.text_files import find_text_files
from hpcdist.data.windows import TokenWindows, permutation
from hpcdist.trainers.lm import CorpusConfig
from hpcdist.trainers.lm.corpus import build

#: An epoch for which a stored order would need 8 GB.
NUM_WINDOWS = 10**9
#: Windows of a step: with 2,048 tokens each, a million tokens.
STEP_WINDOWS = 512
NUM_STEPS = 20
LENGTHS = (128, 2048)
NUM_TOKENS = 50_000_000


def cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU seconds of a piece of work in this process."""
    before = time.process_time()
    work()
    return time.process_time() - before


def order_steps() -> None:
    """Compute the windows of some steps in the middle of an epoch."""
    for step in range(NUM_STEPS):
        first = NUM_WINDOWS // 2 + step * STEP_WINDOWS
        permutation(NUM_WINDOWS, seed=1, epoch=2)(np.arange(first, first + STEP_WINDOWS))


def reading_speed(path: Path, length: int, rounds: int) -> float:
    """Return the tokens per CPU second of reading windows in the order of an epoch."""
    windows = TokenWindows(path, length, seed=1)
    num_windows = min(windows.num_windows, STEP_WINDOWS * NUM_STEPS)
    positions = np.arange(num_windows).reshape(-1, num_windows // NUM_STEPS)

    def read() -> None:
        for part in positions:
            windows.read(0, part)

    read()  # draws the order, and brings the file to memory
    return positions.size * length / median([cpu_s(read) for _ in range(rounds)])


def building(folder: Path, rounds: int) -> dict[str, float]:
    """Return the CPU seconds of building the tokens of a trained tokenizer, and of encoding alone."""
    config = CorpusConfig(tokenizer="bpe")
    tokens, tokenizer = build(config, folder / "first")
    texts = [path.read_text() for path in find_text_files([], key="")]
    tokenizer_file = tokens.parent / next(path.name for path in tokens.parent.glob("bpe-*.json"))
    build_s = []
    alone_s = []
    for number in range(rounds):
        cache = folder / str(number)
        build_s.append(cpu_s(lambda cache=cache: build(CorpusConfig(), cache, tokenizer_file=str(tokenizer_file))))  # type: ignore[misc]
        alone_s.append(cpu_s(lambda: tokenizer.encode_documents(texts)))
    return {"build_s": median(build_s), "alone_s": median(alone_s), "over_alone": median(build_s) / median(alone_s)}


def main() -> None:
    arguments = argument_parser(__doc__, rounds=5).parse_args()
    order_s = [cpu_s(order_steps) for _ in range(arguments.rounds)]
    order_us = 1e6 * median(order_s) / (NUM_STEPS * STEP_WINDOWS)
    print(f"order of {NUM_WINDOWS:,} windows: {order_us:.2f} µs a window, {STEP_WINDOWS} windows at a time")
    rows: dict[str, dict[str, float]] = {"order": {"us": order_us}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "tokens.npy", np.zeros(NUM_TOKENS, np.uint16))
        for length in LENGTHS:
            speed = reading_speed(folder / "tokens.npy", length, arguments.rounds)
            rows[f"length {length}"] = {"tokens_per_s": speed}
            print(f"reading windows of {length}: {speed / 1e6:.1f} million tokens per CPU second")
        rows["build"] = building(folder, arguments.rounds)
    row = rows["build"]
    print(f"tokens of the standard library, BPE: {row['build_s']:.2f} s, tokenizers alone {row['alone_s']:.2f} s")
    if arguments.json:
        print(json.dumps({"benchmark": "token_windows", "rounds": arguments.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
