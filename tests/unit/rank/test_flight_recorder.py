"""Flight records of a rank; the tests of hang diagnostics send the signal to real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcdist.host.files import read_json
from hpcdist.rank.telemetry import enable_flight_recorders, write_records
from hpcdist.run.folder import Attempt, RunDir


@pytest.fixture
def attempt(runs_dir: Path) -> Attempt:
    return RunDir.create(runs_dir / "exp" / "run").new_attempt()


def entry(number: int, group: str = "0", *, done: bool = True) -> dict[str, Any]:
    return {"collective_seq_id": number, "process_group": [group, ""], "retired": done}


def replace_recorder(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(**functions))


def test_last_and_unfinished_entries_of_each_group_are_kept(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [entry(1, "7"), *(entry(number, done=number not in (5, 400, 500)) for number in range(1, 501))]
    recorded = json.dumps({"entries": entries, "pg_status": {"0": {}}}).encode()
    replace_recorder(monkeypatch, _dump_fr_trace_json=lambda: recorded, _dump_nccl_trace_json=lambda: b"{}")
    write_records(attempt, 0, 4)
    record = read_json(attempt.flight(0)) or {}
    assert set(record["recorders"]) == {"gloo"}, "NCCL has no entries"
    kept = [(e["process_group"][0], e["collective_seq_id"]) for e in record["recorders"]["gloo"]["entries"]]
    assert kept == [("7", 1), ("0", 400), *(("0", number) for number in range(481, 501))], (
        "unfinished entry 5 is beyond the limit"
    )
    assert record["recorders"]["gloo"]["pg_status"] == {"0": {}}
    assert not list(attempt.path.glob("flight-rank-*"))


@pytest.mark.parametrize(("world_size", "only_active"), [(64, False), (65, True)])
def test_nccl_dump_is_written_unchanged(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, world_size: int, only_active: bool
) -> None:
    """In large runs the dump has only unfinished entries. NCCL is simulated."""
    recorded = json.dumps({"entries": [entry(1)]}).encode()
    dumped: list[tuple[bool, ...]] = []

    def dump(*flags: bool) -> bytes:
        dumped.append(flags)
        return b"a pickle"

    replace_recorder(monkeypatch, _dump_nccl_trace_json=lambda: recorded, _dump_nccl_trace=dump)
    write_records(attempt, 3, world_size)
    assert dumped == [(True, True, only_active)]
    assert (attempt.path / "flight-rank-3").read_bytes() == b"a pickle"


def test_record_without_torch_is_empty(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._C._distributed_c10d", raising=False)
    write_records(attempt, 0, 2)
    assert (read_json(attempt.flight(0)) or {})["recorders"] == {}


def test_recorders_are_enabled_unless_the_user_has_set_their_variables(attempt: Attempt) -> None:
    env: dict[str, str] = {}
    enable_flight_recorders(attempt, env)
    prefix = str(attempt.path / "flight-rank-")
    assert env == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": prefix}
    for user_env in ({"TORCH_FR_BUFFER_SIZE": "0"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}):
        env = dict(user_env)
        enable_flight_recorders(attempt, env)
        assert env == {**user_env, "TORCH_FR_DUMP_TEMP_FILE": prefix}
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        env = {name: "/tmp/mine"}
        enable_flight_recorders(attempt, env)
        assert env == {name: "/tmp/mine", "TORCH_FR_BUFFER_SIZE": "2000"}
