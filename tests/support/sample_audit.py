"""The samples that a run of `audited.py` has counted: each once an epoch, whatever has happened to its ranks."""

from __future__ import annotations

import json
import math

from hpcdist.run.folder import RunDir


def counted_samples(run: RunDir) -> dict[int, dict[int, list[int]]]:
    """Return the samples by step and micro-batch; steps that a later attempt has repeated count in that attempt alone.

    Asserts that no attempt has computed a micro-batch twice.
    """
    counted: dict[int, dict[int, list[int]]] = {}
    for attempt in run.attempts():
        found: dict[int, dict[int, list[int]]] = {}
        for path in sorted(attempt.path.glob("samples-*.jsonl")):
            for line in path.read_text().splitlines():
                step, number, samples = json.loads(line)
                assert number not in found.setdefault(step, {}), f"attempt {attempt.number}: step {step}, {number}"
                found[step][number] = samples
        # The attempt has continued at its first step.
        first = min(found, default=math.inf)
        counted = {step: parts for step, parts in counted.items() if step < first} | found
    return counted


def assert_each_sample_counts_once(run: RunDir, *, num_samples: int, num_steps: int) -> None:
    """Assert that the steps of the only epoch have each sample once."""
    counted = counted_samples(run)
    assert sorted(counted) == list(range(num_steps))
    found = [sample for step in counted.values() for samples in step.values() for sample in samples]
    assert sorted(found) == list(range(num_samples))
