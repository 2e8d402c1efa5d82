"""Jobs parsed from the output of scontrol, squeue and sacct, recorded from Slurm 22.05, 24.11 and 26.05."""

from __future__ import annotations

from typing import Any

import pytest
from slurm_recordings import recorded

from hpcdist.slurm.output import JobInfo, parse_sacct, parse_scontrol, parse_squeue, parse_time

pytestmark = pytest.mark.usefixtures("utc")


def at(clock: str) -> float:
    found = parse_time(f"2026-11-20T{clock}")
    assert found is not None
    return found


# --- scontrol


@pytest.mark.parametrize(
    ("name", "job", "sentence"),
    [
        ("running", "1", "job 1 is RUNNING on n1"),
        ("failed", "2", "job 2 ended as FAILED with exit code 3 on n1"),
        ("killed", "3", "job 3 ended as FAILED (JobLaunchFailure) by signal 11 on n1"),
        ("completed", "4", "job 4 ended as COMPLETED on n[1-2]"),
        ("begin-time", "5", "job 5 waits (BeginTime)"),
        ("cancelled", "6", "job 6 was cancelled in the queue"),
        ("node-fail", "7", "job 7 ended as NODE_FAIL on n4"),
        ("requeued", "8", "job 8 waits (BeginTime)"),
        ("resources", "9", "job 9 waits (Resources)"),
        ("array-task", "10_2", "job 10_2 waits (BeginTime)"),
        ("het", "11", "job 11 waits (Resources)"),
        ("dependency", "13", "job 13 waits (Dependency)"),
    ],
)
def test_scontrol(name: str, job: str, sentence: str) -> None:
    info = parse_scontrol(recorded("scontrol", name), job)
    assert info is not None
    assert info.sentence() == sentence
    assert info.alive == ("waits" in sentence or " is " in sentence)


def test_requeued_job_of_scontrol() -> None:
    info = parse_scontrol(recorded("scontrol", "requeued"), "8")
    assert info == JobInfo(
        id="8",
        name="requeued",
        state="PENDING",
        reason="BeginTime",
        submitted=at("08:00:57"),
        started=at("08:02:58"),
        ended=at("09:02:58"),
        restarts=1,
        time_limit="01:00:00",
    )
    assert info.describe(at("08:01:57")) == (
        "job 8 waits (BeginTime), expected to start at 2026-11-20 08:02, 0:01:00 in the queue, requeued 1 time"
    )


def test_nodes_of_all_components_of_a_heterogeneous_job() -> None:
    text = recorded("scontrol", "het").replace("JobState=PENDING", "JobState=RUNNING")
    first, second = (line.replace(" NodeList= ", f" NodeList=n{n} ") for n, line in enumerate(text.splitlines(), 1))
    info = parse_scontrol(f"{first}\n{second}\n", "11")
    assert info is not None
    assert info.nodes == "n1,n2"


def test_pending_job_without_an_expected_start() -> None:
    info = parse_scontrol(recorded("scontrol", "dependency"), "13")
    assert info is not None
    assert info.started is None
    assert info.describe(at("08:00:54")) == "job 13 waits (Dependency), 0:00:01 in the queue"


def test_empty_output_is_none() -> None:
    assert parse_scontrol("", "1") is None
    assert parse_squeue("", "1") is None
    assert parse_sacct("", "1") is None


# --- squeue


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        ("1", "job 1 is RUNNING on n1"),
        ("2", "job 2 ended as FAILED on n1"),
        ("4", "job 4 ended as COMPLETED on n[1-2]"),
        ("6", "job 6 was cancelled in the queue"),
        ("8", "job 8 waits (BeginTime)"),
        ("10_2", "job 10_2 waits (BeginTime)"),
        ("11", "job 11 waits (Resources)"),
        ("13", "job 13 waits (Dependency)"),
    ],
)
def test_squeue(job: str, sentence: str) -> None:
    info = parse_squeue(recorded("squeue"), job)
    assert info is not None
    assert info.sentence() == sentence


# --- sacct


@pytest.mark.parametrize(
    ("name", "job", "sentence", "earlier"),
    [
        ("failed", "2", "job 2 ended as FAILED with exit code 3 on n1", ()),
        ("killed", "3", "job 3 ended as FAILED by signal 11 on n1", ()),
        ("completed", "4", "job 4 ended as COMPLETED on n[1-2]", ()),
        ("cancelled", "6", "job 6 was cancelled in the queue", ()),
        ("node-fail", "7", "job 7 ended as NODE_FAIL on n4", ()),
        ("requeued", "8", "job 8 is RUNNING on n3", ("REQUEUED",)),
        ("preempted", "16", "job 16 waits (PENDING)", ("PREEMPTED",)),
        ("timeout", "1", "job 1 ended as TIMEOUT on n1", ()),
        ("het", "11", "job 11 is RUNNING on n1", ()),
        ("array-task", "18_1", "job 18_1 ended as COMPLETED on n1", ()),
    ],
)
def test_sacct(name: str, job: str, sentence: str, earlier: tuple[str, ...]) -> None:
    info = parse_sacct(recorded("sacct", name), job)
    assert info is not None
    assert (info.sentence(), info.earlier, info.restarts) == (sentence, earlier, len(earlier))


def test_memory_and_steps_of_sacct() -> None:
    info = parse_sacct(recorded("sacct", "timeout"), "1")
    assert info is not None
    assert (info.max_rss, info.step_states, info.out_of_memory) == ("3404K", ("CANCELLED",), False)
    text = (
        recorded("sacct", "timeout") + "1.0|step|OUT_OF_MEMORY|0:125|x|x|x|n1||1.5G\n1.1|step|FAILED|1:0|x|x|x|n1||9M\n"
    )
    info = parse_sacct(text, "1")
    assert info is not None
    assert (info.max_rss, info.out_of_memory) == ("1.5G", True)


def test_sizes_of_a_job_that_has_lost_a_node_are_one_start() -> None:
    rows = [
        "7|j|RESIZING|0:0|2026-11-20T06:00:00|2026-11-20T06:00:05|2026-11-20T06:01:05|n[1-4]|10:00|",
        "7|j|COMPLETED|0:0|2026-11-20T06:00:00|2026-11-20T06:01:05|2026-11-20T06:02:05|n[1-3]|10:00|",
    ]
    info, first = parse_sacct("\n".join(rows), "7"), parse_sacct(rows[0], "7")
    assert info is not None
    assert first is not None
    assert (info.restarts, info.earlier, info.state, info.started) == (0, (), "COMPLETED", first.started)


def test_pending_array_tasks_have_no_records_of_their_own_in_accounting() -> None:
    assert parse_sacct(recorded("sacct", "array-waiting"), "10_2") is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"state": "PENDING", "submitted": 100.0, "started": 900.0}, 50.0),
        ({"state": "RUNNING", "submitted": 100.0, "started": 130.0}, 30.0),
        ({"state": "COMPLETED", "submitted": 100.0, "started": 99.0}, 0.0),
        ({"state": "CANCELLED", "submitted": 100.0}, None),
    ],
)
def test_time_in_the_queue(changes: dict[str, Any], expected: float | None) -> None:
    assert JobInfo(id="1", **changes).queue_s(150.0) == expected


# --- other releases and damaged lines


@pytest.mark.parametrize("release", ["24_11", "26_05"])
def test_output_of_newer_releases(release: str) -> None:
    def text(command: str, section: str) -> str:
        return recorded(command, section, release=release)

    def sentence(info: JobInfo | None) -> str:
        assert info is not None
        return info.sentence()

    assert sentence(parse_scontrol(text("scontrol", "1"), "1")) == "job 1 is RUNNING on n[1-2]"
    assert sentence(parse_scontrol(text("scontrol", "2_1"), "2_1")) == "job 2_1 ended as FAILED with exit code 3 on n1"
    assert sentence(parse_scontrol(text("scontrol", "3"), "3")) == "job 3 is RUNNING on n1,n2"
    assert sentence(parse_scontrol(text("scontrol", "requeued"), "1")) == "job 1 waits (BeginTime)"
    assert sentence(parse_squeue(text("squeue", "2"), "2_1")) == "job 2_1 ended as FAILED on n1"
    assert sentence(parse_sacct(text("sacct", "1"), "1")) == "job 1 ended as CANCELLED on n[2-3]"
    past = parse_sacct(text("sacct", "1"), "1")
    assert past is not None
    assert past.earlier == ("REQUEUED",)


def test_lines_of_another_format_are_ignored() -> None:
    info = parse_scontrol(f"JobId=1 Restarts=x ExitCode={'9' * 5000}:0", "1")
    assert info is not None
    assert (info.state, info.restarts, info.exit_code) == ("UNKNOWN", 0, 0)
    assert parse_squeue("slurm_load_jobs error\n1|RUNNING\n", "1") is None
    assert parse_sacct("1\n1|a|b\n", "1") is None
    rows = "1|a|COMPLETED|0:0|x|x|x|n1|1|\n1.0|s|COMPLETED|0:0|x|x|x|n1|1|1.2.3K\n"
    info = parse_sacct(rows, "1")
    assert info is not None
    assert info.max_rss == "1.2.3K"
