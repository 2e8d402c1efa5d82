"""What a rank tells of its collectives; that it does so at a signal is tested with processes, in test_stacks.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcdist.files.atomic import read_json
from hpcdist.rank.telemetry.flight_recorder import enable_flight_recorders, write_records
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir


@pytest.fixture
def attempt(runs_dir: Path) -> Attempt:
    return RunDir.create(runs_dir / "exp" / "run").new_attempt()


def entry(number: int, group: str = "0", *, done: bool = True) -> dict[str, Any]:
    return {"collective_seq_id": number, "process_group": [group, ""], "retired": done}


def recorder(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(**functions))


def test_the_last_entries_of_each_group_are_kept_and_those_that_have_not_ended(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [entry(1, "7"), *(entry(number, done=number not in (5, 400, 500)) for number in range(1, 501))]
    recorded = json.dumps({"entries": entries, "pg_status": {"0": {}}}).encode()
    recorder(monkeypatch, _dump_fr_trace_json=lambda: recorded, _dump_nccl_trace_json=lambda: b"{}")
    write_records(attempt, 0, 4)
    record = read_json(attempt.flight(0)) or {}
    assert set(record["recorders"]) == {"gloo"}, "NCCL has recorded nothing"
    kept = [(e["process_group"][0], e["collective_seq_id"]) for e in record["recorders"]["gloo"]["entries"]]
    assert kept == [("7", 1), ("0", 400), *(("0", number) for number in range(481, 501))], "5 is too long ago"
    assert record["recorders"]["gloo"]["pg_status"] == {"0": {}}
    assert not list(attempt.path.glob("flight-rank-*"))


@pytest.mark.parametrize(("world_size", "only_active"), [(64, False), (65, True)])
def test_nccls_own_dump_by_a_stand_in_for_want_of_a_gpu(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, world_size: int, only_active: bool
) -> None:
    """Its pickle is left as it is; in large runs only what has not ended is in it."""
    recorded = json.dumps({"entries": [entry(1)]}).encode()
    asked: list[tuple[bool, ...]] = []

    def dump(*which: bool) -> bytes:
        asked.append(which)
        return b"a pickle"

    recorder(monkeypatch, _dump_nccl_trace_json=lambda: recorded, _dump_nccl_trace=dump)
    write_records(attempt, 3, world_size)
    assert asked == [(True, True, only_active)]
    assert (attempt.path / "flight-rank-3").read_bytes() == b"a pickle"


def test_without_torch_there_is_nothing_to_tell(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._C._distributed_c10d", raising=False)
    write_records(attempt, 0, 2)
    assert (read_json(attempt.flight(0)) or {})["recorders"] == {}


def test_the_recorders_are_on_and_write_into_the_attempts_folder_unless_somebody_has_set_them(attempt: Attempt) -> None:
    env: dict[str, str] = {}
    enable_flight_recorders(attempt, env)
    prefix = str(attempt.path / "flight-rank-")
    assert env == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": prefix}
    for theirs in ({"TORCH_FR_BUFFER_SIZE": "0"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}):
        env = dict(theirs)
        enable_flight_recorders(attempt, env)
        assert env == {**theirs, "TORCH_FR_DUMP_TEMP_FILE": prefix}
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        env = {name: "/tmp/mine"}
        enable_flight_recorders(attempt, env)
        assert env == {name: "/tmp/mine", "TORCH_FR_BUFFER_SIZE": "2000"}
