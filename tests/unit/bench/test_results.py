"""The results file of a communication benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcdist.bench.results import ARTIFACT, CheckResult, Overlap, Pair, RankPlace, Results, Row, Rpc, read_results
from hpcdist.errors import RunFolderError

RESULTS = Results(
    backend="gloo",
    device="cpu",
    world_size=2,
    torch="2.15.0",
    nccl=None,
    partition="main",
    nodes=["n1", "n2"],
    ranks=[RankPlace(rank=0, node="n1", device="cpu"), RankPlace(rank=1, node="n2", device="cpu")],
    complete=True,
    checked=[CheckResult(operation="all_reduce[sum]", group="world", dtype="float32", ok=True)],
    rows=[
        Row(
            operation="all_reduce",
            variant="sum",
            mode="blocking",
            depth=1,
            group="world",
            group_size=2,
            dtype="float32",
            size=4,
            bytes=4,
            iterations=3,
            median_s=2e-4,
            p99_s=3e-4,
            min_s=1e-4,
            algbw=2e4,
            busbw=2e4,
        )
    ],
    pairs=[Pair(source=0, target=1, bytes=1 << 22, latency_s=1e-4, bandwidth=1e9)],
    overlap=[
        Overlap(operation="all_reduce", bytes=4, compute_s=1.0, communication_s=1.0, together_s=1.5, hidden=0.5),
    ],
    rpc=[
        Rpc(
            source="n1/0",
            target="n2/1",
            bytes=4,
            device="cpu",
            latency_s=5e-4,
            p99_s=6e-4,
            calls_per_s=9e3,
            in_flight=16,
            bandwidth=1e5,
        )
    ],
    notes=["reduce: nothing above 1 MiB"],
)


def test_results_are_read_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / ARTIFACT
    path.parent.mkdir()
    path.write_text(RESULTS.to_json())
    assert read_results(tmp_path) == RESULTS


def test_unknown_keys_are_ignored() -> None:
    tree = json.loads(RESULTS.to_json())
    tree["rows"][0]["new"] = tree["new"] = 1
    assert Results.from_json(json.dumps(tree)) == RESULTS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "version None is not 1"),
        ('{"version": 2}', "version 2 is not 1"),
        ('{"version": 1}', "missing"),
        ('{"version": 1, "pairs": [{"source": 0}]}', "is not a valid Pair"),
        ("{", "cannot be read"),
    ],
)
def test_invalid_results_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / ARTIFACT
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(RunFolderError, match=message):
        read_results(tmp_path)


def test_missing_results_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(
        RunFolderError, match=r"comm/results.json does not exist: is this a run of `hpcdist bench comm`"
    ):
        read_results(tmp_path)
