"""Writing and reading of journals, with full disks, outages of the file server and damaged files."""

import errno
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import numpy
import pytest
from tracking_scene import CONFIG, Scene

from hpcdist.errors import HpcdistError, RunFolderError, UserMistake
from hpcdist.run.config_origin import Origin, write_origin
from hpcdist.tracking import journal


def line(step: int, value: float = 0.5) -> bytes:
    return json.dumps({"t": 1000 + step, "s": step, "m": {"loss": value}}).encode() + b"\n"


def test_record_is_one_line_with_time_step_and_values(tmp_path: Path) -> None:
    names = ['a"b', "c\nd", "größe", "\\", ""]
    with journal.JournalWriter(tmp_path, attempt=2, rank=3) as writer:
        writer.flush()
        assert journal.journal_files(tmp_path) == [], "there is no file without records"
        number: Any = numpy.float32(0.5)
        step: Any = numpy.int64(12)
        writer.log({"loss": 0.25, "samples": 7, "a": number, "b": True, "c": 10**30}, step)
        writer.log({"loss": math.nan, "up": math.inf, "down": -math.inf}, 13)
        writer.log(dict.fromkeys(names, 1.0) | {"\ud800": 1.0}, 14)
    assert writer.path == tmp_path / "attempt-002.rank-00003.jsonl"
    (first, second, third), offset = journal.read_records(writer.path)
    assert first[1:] == (12, {"loss": 0.25, "samples": 7.0, "a": 0.5, "b": 1.0, "c": 1e30})
    assert math.isnan(second.metrics.pop("loss"))
    assert second[1:] == (13, {"up": math.inf, "down": -math.inf})
    assert list(third.metrics) == [*names, "?--91a681b99855"]
    assert 1.6e12 < first.time_ms <= second.time_ms < 4e12
    assert offset == writer.path.stat().st_size
    assert writer.path.read_bytes().count(b"\n") == 4


def test_value_that_is_not_a_number_is_rejected_with_its_name(tmp_path: Path) -> None:
    with journal.JournalWriter(tmp_path) as writer:
        for value in ("0.5", b"1", None, [1.0], 1j, 10**400):
            with pytest.raises(UserMistake, match="metric 'bad' must be a number, got"):
                writer.log({"fine": 1.0, "bad": value}, 0)  # type: ignore[dict-item]
    assert not writer.path.exists()


def test_invalid_name_or_step_is_rejected(tmp_path: Path) -> None:
    with journal.JournalWriter(tmp_path) as writer:
        with pytest.raises(UserMistake, match="metric name 7 must be a string"):
            writer.log({7: 1.0}, 0)  # type: ignore[dict-item]
        with pytest.raises(UserMistake, match=r"metric name 'n{40}'… has 5000 characters: use at most 250"):
            writer.log({"n" * 5000: 1.0}, 0)
        with pytest.raises(UserMistake, match=r"logged with step 0\.5: a step must be an integer"):
            writer.log({"loss": 1.0}, 0.5)  # type: ignore[arg-type]
        with pytest.raises(UserMistake, match=r"a step outside of .* .64 bits"):
            writer.log({"loss": 1.0}, 2**63)
        with pytest.raises(UserMistake, match="33220 bits"):
            writer.log({"loss": 1.0}, 10**10_000)
    assert not writer.path.exists()


def test_long_records_and_names_that_are_no_text_are_recorded(tmp_path: Path) -> None:
    metrics = {f"layer/{number}/{'ü' * (number % 50)}": number / 7 for number in range(20_000)}
    surrogates = {"x" + text: float(number) for number, text in enumerate((chr(0xD800), chr(0xD801), "?"), 1)}
    with journal.JournalWriter(tmp_path) as writer:
        for step in (1, 2):
            writer.log(metrics, step)
            writer.log(surrogates, step)
    assert max(map(len, writer.path.read_bytes().splitlines(keepends=True))) <= journal.MAX_LINE_BYTES
    records, offset = journal.read_records(writer.path)
    assert offset == writer.path.stat().st_size
    assert len({(record.time_ms, record.step) for record in records}) <= 4
    for step in (1, 2):
        found = [(key, value) for record in records if record.step == step for key, value in record.metrics.items()]
        assert len(dict(found)) == len(found) == len(metrics) + 3
        assert metrics.items() <= dict(found).items()
        assert sorted(value for key, value in found if key.startswith("x")) == [1.0, 2.0, 3.0]


class FailingServer:
    """Make one call of the journal fail, as during a short outage of a file server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str, error: int, *, partial: bool = True) -> None:
        self.num_failures = 0
        real = getattr(os, call)

        def operation(*arguments: Any) -> Any:
            if self.num_failures:
                self.num_failures -= 1
                if call == "pwrite" and partial:  # a part of it is written
                    real(arguments[0], bytes(arguments[1][: len(arguments[1]) // 2]), arguments[2])
                raise OSError(error, os.strerror(error))
            return real(*arguments)

        monkeypatch.setattr(os, call, operation)


def test_full_disk_causes_one_warning_and_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = journal.JournalWriter(tmp_path)
    writer.log({"loss": 1.0}, 0)
    disk = FailingServer(monkeypatch, "pwrite", errno.ENOSPC)
    disk.num_failures = 10**9
    for step in range(1, 4):
        writer.log({"loss": 1.0}, step)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["metrics are kept in memory"]
    records, offset = journal.read_records(writer.path)
    assert [record.step for record in records] == [0, 1], "half of what is pending is written"
    assert offset < writer.path.stat().st_size, "the incomplete line of a running writer is not read"
    with pytest.raises(
        HpcdistError, match=r"rank-00000\.jsonl cannot be written \(No space left on device\): free space"
    ):
        writer.flush()
    disk.num_failures = 0
    writer.log({"loss": 1.0}, 4)
    assert "no metrics were lost" in caplog.records[-1].getMessage()
    writer.close()
    assert [record.step for record in journal.read_records(writer.path)[0]] == [0, 1, 2, 3, 4]


def test_incomplete_last_line_is_read_when_final(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "attempt-001.rank-00000.jsonl"
    path.write_bytes(line(1) + line(2)[:-9])
    records, offset = journal.read_records(path)
    assert ([record.step for record in records], offset) == ([1], len(line(1)))
    assert journal.read_records(path, offset) == ([], offset)
    assert journal.read_chunk(path, offset, final=True) == ([], path.stat().st_size, 1)
    assert "skipped 1 damaged line(s) from byte" in caplog.text
    # A new writer of the same file starts a new line.
    with journal.JournalWriter(tmp_path) as writer:
        writer.log({"loss": 1.0}, 3)
    assert [record.step for record in journal.read_records(path)[0]] == [1, 3]


INVALID_LINES = [
    b"{}",
    b"null",
    b"\0" * 40,
    b"\xff\xfe\x00garbage",
    b"[" * 5000,
    b'{"t":1,"s":2}',
    b'{"t":1,"s":2,"m":[]}',
    b'{"t":1,"s":2,"m":{"a":"0.5"}}',
    b'{"t":1,"s":2,"m":{"a":null}}',
    b'{"t":1.5,"s":2,"m":{"a":1}}',
    b'{"t":true,"s":2,"m":{"a":1}}',
    b'{"t":-1,"s":2,"m":{"a":1}}',
    b'{"t":1,"s":9223372036854775808,"m":{"a":1}}',
    b'{"t":1,"s":2,"m":{"a":1' + b"0" * 400 + b"}}",
    b'{"t":1,"s":2,"m":{"a":1' + b"0" * 9000 + b"}}",
    b'{"t":1,"s":2,"m":{"\\ud800":1}}',
    b'{"t":1,"s":2,"m":{"a":1}}{"t":1',
]


def test_damaged_line_does_not_affect_other_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    path = tmp_path / "x.jsonl"
    for invalid in INVALID_LINES:
        path.write_bytes(line(1) + invalid + b"\n" + line(2))
        chunk = journal.read_chunk(path, 0)
        assert ([record.step for record in chunk.records], chunk.broken) == ([1, 2], 1), invalid
        assert chunk.offset == path.stat().st_size


def test_journal_files_are_sorted_by_attempt_and_rank(tmp_path: Path) -> None:
    for name in ("attempt-1000.rank-00000.jsonl", "attempt-002.rank-00001.jsonl", "attempt-002.rank-00000.jsonl"):
        (tmp_path / name).touch()
    for other in ("sent-points.json", ".shipper.lock", "attempt-x.rank-0.jsonl"):
        (tmp_path / other).touch()
    assert [(file.attempt, file.rank) for file in journal.journal_files(tmp_path)] == [(2, 0), (2, 1), (1000, 0)]
    assert journal.read_records(tmp_path / "absent.jsonl") == ([], 0)


@pytest.mark.parametrize(("call", "error"), [("pwrite", errno.EDQUOT), ("open", errno.EIO), ("fstat", errno.ESTALE)])
def test_records_are_written_once_and_in_order_after_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    server = FailingServer(monkeypatch, call, error)
    failing = FailingServer(monkeypatch, "pwrite", error) if call != "pwrite" else server
    with journal.JournalWriter(tmp_path) as writer:
        writer.log({"loss": 1.0}, 0)
        failing.num_failures = server.num_failures = 1  # the file is opened again after an error
        for step in range(1, 5):
            writer.log({"loss": 1.0}, step)
    assert [record.step for record in journal.read_records(writer.path)[0]] == [0, 1, 2, 3, 4]
    assert writer.path.read_bytes().count(b"\n") == 6  # the format first


def test_data_is_written_again_after_a_failed_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FailingServer(monkeypatch, "fsync", errno.EIO)
    with journal.JournalWriter(tmp_path) as writer:
        writer.log({"loss": 1.0}, 0)
        writer.flush()
        synced = writer.path.read_bytes()
        writer.log({"loss": 1.0}, 1)
        writer.path.write_bytes(synced)  # the server loses data that is not on its disk
        server.num_failures = 1
        writer.flush()
        assert [record.step for record in journal.read_records(writer.path)[0]] == [0, 1]


def test_data_is_written_again_after_the_file_server_lost_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FailingServer(monkeypatch, "pwrite", errno.ESTALE, partial=False)
    with journal.JournalWriter(tmp_path) as writer:
        for step in range(3):
            writer.log({"loss": 1.0}, step)
        os.truncate(writer.path, 7)
        server.num_failures = 1
        writer.log({"loss": 1.0}, 3)
        writer.log({"loss": 1.0}, 4)
    assert [record.step for record in journal.read_records(writer.path)[0]] == [0, 1, 2, 3, 4]


def test_pending_records_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_PENDING_BYTES", 100)
    disk = FailingServer(monkeypatch, "pwrite", errno.ENOSPC)
    disk.num_failures = 10**9
    writer = journal.JournalWriter(tmp_path)
    writer.log({"loss": 1.0}, 0)
    writer.log({"loss": 1.0}, 1)
    with pytest.raises(HpcdistError, match=r"\(No space left on device\), and 0 MiB of records are pending: "):
        writer.log({"loss": 1.0}, 2)
    disk.num_failures = 0
    writer.close()
    assert [record.step for record in journal.read_records(writer.path)[0]] == [0, 1, 2]


# --- Parameters of a script in MLflow: its arguments, and what it logs itself.


def test_arguments_and_logged_parameters_are_there_once(scene: Scene) -> None:
    script = ["/a/train.py", "--lr", "5e-5", "--fp16", "--batch-size=8"]
    scene.write_config(CONFIG | {"trainer": {"target": "ddp", "script": script}})
    write_origin(scene.run, Origin(config="train.yaml", values={}, written=["trainer.script"]))
    events = journal.EventWriter(scene.run.journal, 1, 0)
    for name, value in {"lr": "5e-05", "fp16": "True", "batch_size": "16", "optim.lr": "0.1"}.items():
        events.record("param", {name: value})
    events.close()
    scene.shipper().ship_once()
    found = scene.entity.data.params
    assert found.pop("trainer.script").startswith('["/a/train.py", ')
    assert found == {"lr": "5e-5", "fp16": "true", "batch_size": "8", "script.batch_size": "16", "optim.lr": "0.1"}
    assert not [tag for tag in scene.entity.data.tags if "changed" in tag]


def test_journal_of_a_newer_format_is_an_error(tmp_path: Path) -> None:
    with journal.JournalWriter(tmp_path) as writer:
        writer.log({"loss": 1.0}, 1)
    text = writer.path.read_text()
    assert text.startswith('{"format": 1}\n')
    assert [record.step for record in journal.read_records(writer.path)[0]] == [1]
    writer.path.write_text(text.partition("\n")[2])
    assert [record.step for record in journal.read_records(writer.path)[0]] == [1]
    writer.path.write_text('{"format": 2}\n' + text)
    with pytest.raises(RunFolderError, match=r"jsonl was written by a newer hpcdist \(format 2; "):
        journal.read_records(writer.path)
