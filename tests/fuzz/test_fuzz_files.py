"""Damaged files raise the project's errors or are skipped."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from config_strategies import json_values
from fuzzing import fuzz
from hypothesis import strategies as st

from hpcdist.checkpoint.store import read_manifest
from hpcdist.config.loading import load_config
from hpcdist.config.written import to_yaml
from hpcdist.errors import HpcdistError
from hpcdist.host.json_files import read_json, write_json
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import holder
from hpcdist.run.status import job_of, status_of
from hpcdist.run.sweeps import SweepDir
from hpcdist.slurm import client
from hpcdist.slurm.on_nodes import answer_lines, read_answers
from hpcdist.slurm.output import SlurmError
from hpcdist.tracking.journal import read_chunk

DEEP = "[" * 3000  # beyond the recursion limit
JSON_NOISE = st.sampled_from(
    [b"", b"{", b"{}", b"[]", b"null", b"1", b'"a"', b"\xff\xfe", b"\0" * 10, DEEP.encode(), b'{"a": ' * 3000, b"NaN",
     b'{"status": "x"}', b"9" * 5000, b'{"attempt": ' + b"9" * 5000 + b"}", b'{"created": 1e999}', b'"\\ud800"']
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, original: bytes) -> bytes:
    """Draw a damaged JSON document: changed fields, replaced bytes, a truncated document, or other data."""
    tree = json.loads(original)
    kind = draw(st.sampled_from(["fields", "bytes", "cut", "noise", "binary"]))
    if kind == "fields" and isinstance(tree, dict):
        for key in draw(st.lists(st.sampled_from(sorted(tree) or ["a"]), max_size=3)):
            tree[key] = draw(json_values)
        if draw(st.booleans()):
            tree.pop(draw(st.sampled_from(sorted(tree) or ["a"])), None)
        if draw(st.booleans()):
            tree[draw(st.text(max_size=5))] = 1
        return json.dumps(tree).encode("utf-8", "surrogatepass")
    start = draw(st.integers(0, len(original)))
    if kind == "bytes":
        return original[:start] + draw(st.binary(max_size=6)) + original[start + draw(st.integers(0, 6)) :]
    if kind == "cut":
        return original[:start]
    return draw(JSON_NOISE) if kind == "noise" else draw(st.binary(max_size=40))


STATE = {"status": "failed", "attempt": 1, "restarts": 0, "reason": "x", "created": 1e9, "ended": 1e9, "world_size": 2}
FILES: dict[str, dict[str, Any]] = {
    "state.json": STATE,
    "lease": {"host": "h", "pid": 1, "user": "u", "renewed": 1e9, "job_id": None, "start": 1},
    "slurm.json": {"job_id": "1", "name": "a", "cluster": "c"},
    "mlflow.json": {"run_id": "a", "uri": "sqlite:///x"},
    "environment.json": {"code": {"root": "/x", "copied": True}},
    "container.json": {"runtime": "podman", "image": "a"},
    "sweep.json": {"keys": ["seed"], "cells": [], "base": {}},
    "journal/sent-files.json": {"artifacts": {}},
    "attempts/001/rank-00000.outcome.json": {"outcome": "failed", "error": "x", "step": 1},
    "attempts/001/rank-00000.beat.json": {"time": 1e9, "step": 1, "phase": "x"},
    "attempts/001/request.json": {"action": "stop", "cause": "user", "by": "a"},
    "attempts/001/failure.json": {"kind": "x", "reason": "y"},
    "checkpoints/step-00000100/manifest.json": {"step": 1, "files": {}},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    found = RunDir.create(tmp_path_factory.mktemp("fuzz") / "runs" / "exp" / "first")
    found.config.write_text(to_yaml(load_config("ddp_digits", ["seed=1"])))
    for name, content in FILES.items():
        (found.path / name).parent.mkdir(parents=True, exist_ok=True)
        write_json(found.path / name, content)
    return found


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object, **__: object) -> str:
        raise SlurmError("no Slurm here", installed=False)

    monkeypatch.setattr(client, "run", unavailable)


@fuzz(name=st.sampled_from(sorted(FILES)), data=st.data())
def test_damaged_file_of_a_run_folder_raises_own_errors_only(
    no_slurm: None, run: RunDir, name: str, data: st.DataObject
) -> None:
    path = run.path / name
    original = path.read_bytes()
    path.write_bytes(data.draw(damaged(original)))
    try:
        for read in (
            lambda: read_json(path),
            lambda: run.read_state(),
            lambda: job_of(run),
            lambda: holder(run),
            lambda: status_of(run),
            lambda: run.attempt(1).outcomes(),
            lambda: read_manifest(run.checkpoints / "step-00000100"),
            lambda: SweepDir(run.path).read(),
        ):
            with suppress(HpcdistError):
                read()
    finally:
        path.write_bytes(original)


RECORD = b'{"t":1760000000000,"s":120,"m":{"train/loss":0.31}}\n'
LINES = st.one_of(
    st.just(RECORD), damaged(RECORD).map(lambda line: line + b"\n"), st.binary(max_size=30), st.just(b"\n")
)


@fuzz(lines=st.lists(LINES, max_size=8), offset=st.integers(0, 200), final=st.booleans())
def test_damaged_journal_gives_valid_records(run: RunDir, lines: Sequence[bytes], offset: int, final: bool) -> None:
    path = run.journal / "attempt-001.rank-00000.jsonl"
    path.write_bytes(b"".join(lines))
    records, end, _ = read_chunk(path, min(offset, path.stat().st_size), final=final)
    assert end <= path.stat().st_size
    assert all(isinstance(value, int | float) for record in records for value in record.metrics.values())


ANSWER = answer_lines("n1", {"group": {"received_s": {}}, "text": "a" * 2000})


@fuzz(lines=st.lists(st.one_of(st.sampled_from(ANSWER), st.text(max_size=20)), max_size=6), data=st.data())
def test_damaged_probe_output_gives_reports(lines: list[str], data: st.DataObject) -> None:
    text = "\n".join(lines)
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, len(text)))
        noise = data.draw(st.one_of(st.text(max_size=6), st.sampled_from(["9" * 5000, "\n", " 0/1 ", DEEP, "5/2"])))
        text = text[:start] + noise + text[start + data.draw(st.integers(0, 6)) :]
    for answer in read_answers(text).values():
        assert answer is None or isinstance(answer, dict)
