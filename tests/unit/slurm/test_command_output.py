"""Values and records in the output of Slurm's commands."""

from __future__ import annotations

import time

import pytest

from hpcdist.slurm.output import (
    parse_count,
    parse_memory_mb,
    parse_minutes,
    parse_record,
    parse_records,
    parse_seconds,
    parse_settings,
    parse_text,
    parse_time,
)


def test_record() -> None:
    record = parse_record(
        "JobId=41 JobName=digits/first JobState=RUNNING Dependency=(null) Restarts=2 EndTime=2026-11-20T07:05:00"
        " Command=/shared/my run.sh --flag=a=b"
    )
    assert (record["JobId"], record["Restarts"], record["EndTime"]) == ("41", "2", "2026-11-20T07:05:00")
    assert (record["Dependency"], record["Command"], "--flag" in record) == ("(null)", "/shared/my", False)
    assert parse_record("") == {}


def test_first_value_of_a_key_counts() -> None:
    """Free text at the end of a record may contain words that look like keys."""
    line = "JobId=1 JobState=RUNNING NodeList=n1 SubmitLine=sbatch --wrap=x JobState=FAILED NodeList=n9"
    record = parse_record(line)
    assert (record["JobState"], record["NodeList"]) == ("RUNNING", "n1")


def test_free_text_is_not_searched_for_keys() -> None:
    """Keys that plain jobs lack, such as ArrayTaskId, must not come from the user's texts."""
    line = (
        "JobId=1 JobName=a JobState=FAILED b UserId=ada(7) JobState=RUNNING NodeList=n1 Command=/x HetJobOffset=1"
        " SubmitLine=sbatch ArrayTaskId=2 WorkDir=/tmp Comment=Restarts=9"
    )
    assert parse_record(line) == {
        "JobId": "1",
        "JobName": "a JobState=FAILED b",
        "UserId": "ada(7)",
        "JobState": "RUNNING",
        "NodeList": "n1",
        "Command": "/x",
    }


def test_heterogeneous_job_has_one_record_per_component() -> None:
    text = "JobId=41 HetJobOffset=0 JobState=RUNNING\n\nJobId=42 HetJobOffset=1 JobState=RUNNING\n"
    assert [(record["JobId"], record["HetJobOffset"]) for record in parse_records(text)] == [("41", "0"), ("42", "1")]


def test_settings() -> None:
    text = "Configuration data as of 2026-11-20T08:00:00\nSlurmctldPort = 6817\nClusterName             = here\n"
    assert parse_settings(text) == {"SlurmctldPort": "6817", "ClusterName": "here"}


@pytest.mark.parametrize(("text", "value"), [("n1", "n1"), ("(null)", ""), ("None assigned", ""), ("", ""), (None, "")])
def test_text(text: str | None, value: str) -> None:
    assert parse_text(text) == value


@pytest.mark.parametrize(
    ("text", "count"), [("12", 12), ("UNLIMITED", None), ("²", None), ("9" * 5000, None), ("", None)]
)
def test_count(text: str, count: int | None) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
def test_times_are_local(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        seconds = parse_time("2026-11-20T07:05:00")
        assert seconds is not None
        assert time.strftime("%H:%M", time.localtime(seconds)) == "07:05"
        assert (seconds == 1795158300) == (zone == "UTC")
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("text", ["Unknown", "N/A", "", None, "None"])
def test_missing_time_is_none(text: str | None) -> None:
    assert parse_time(text) is None
    assert parse_time("9999-12-31T23:59:59") is not None


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("1-00:00:00", 1440),
        ("00:30:00", 30),
        ("2-12", 3600),
        ("90", 90),
        ("10:30", 10.5),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_time_limit_in_minutes(text: str, minutes: float | None) -> None:
    assert parse_minutes(text) == minutes


@pytest.mark.parametrize(("text", "value"), [("30 sec", 30), ("2 min", 120), ("30", 30), ("soon", None), ("", None)])
def test_duration_in_seconds(text: str, value: int | None) -> None:
    assert parse_seconds(text) == value


@pytest.mark.parametrize(
    ("text", "megabytes"),
    [
        ("2000", 2000),
        ("64G", 65536),
        ("64gb", 65536),
        ("1T", 1048576),
        ("2048K", 2),
        ("0", 0),
        ("lots", None),
        ("9" * 5000, None),
        ("", None),
    ],
)
def test_memory_in_mib(text: str, megabytes: float | None) -> None:
    assert parse_memory_mb(text) == megabytes
