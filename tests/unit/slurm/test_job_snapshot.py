"""What is read from Slurm's commands, recorded from Slurm 22.05.8, and what is asked of which of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcdist.slurm import job_snapshot
from hpcdist.slurm.job_info import JobInfo, parse_facts, parse_sacct, parse_scontrol, parse_squeue, parse_time
from hpcdist.slurm.job_snapshot import JobRef, JobSnapshot, SlurmUnavailableError, ask, ask_many, look_at

RECORDED = Path(__file__).parent / "slurm_22_05"


def recorded(command: str, name: str) -> str:
    """What a command printed of one job."""
    return (RECORDED / f"{command}.txt").read_text().partition(f"### {name}\n")[2].partition("###")[0]


@pytest.fixture(autouse=True)
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The recordings' zone."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


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
def test_a_job_by_scontrol(name: str, job: str, sentence: str) -> None:
    facts = parse_scontrol(recorded("scontrol", name), job)
    assert facts is not None
    assert facts.sentence() == sentence
    assert facts.alive == ("waits" in sentence or " is " in sentence)


def test_all_that_scontrol_says_of_a_requeued_job() -> None:
    facts = parse_scontrol(recorded("scontrol", "requeued"), "8")
    assert facts == JobInfo(
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
    assert facts.describe(at("08:01:57")) == (
        "job 8 waits (BeginTime), expected to start at 2026-11-20 08:02, 0:01:00 in the queue, queued again 1 time"
    )


def test_the_nodes_of_all_components_of_a_heterogeneous_job() -> None:
    text = recorded("scontrol", "het").replace("JobState=PENDING", "JobState=RUNNING")
    first, second = (line.replace(" NodeList= ", f" NodeList=n{n} ") for n, line in enumerate(text.splitlines(), 1))
    facts = parse_scontrol(f"{first}\n{second}\n", "11")
    assert facts is not None
    assert facts.nodes == "n1,n2"


def test_a_job_without_an_expected_start(in_utc: None) -> None:
    facts = parse_scontrol(recorded("scontrol", "dependency"), "13")
    assert facts is not None
    assert facts.started is None
    assert facts.describe(at("08:00:54")) == "job 13 waits (Dependency), 0:00:01 in the queue"


def test_nothing_printed_is_no_job() -> None:
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
def test_a_job_by_squeue(job: str, sentence: str) -> None:
    facts = parse_squeue((RECORDED / "squeue.txt").read_text(), job)
    assert facts is not None
    assert facts.sentence() == sentence


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
def test_a_job_by_sacct(name: str, job: str, sentence: str, earlier: tuple[str, ...]) -> None:
    facts = parse_sacct(recorded("sacct", name), job)
    assert facts is not None
    assert (facts.sentence(), facts.earlier, facts.restarts) == (sentence, earlier, len(earlier))


def test_what_accounting_alone_knows() -> None:
    facts = parse_sacct(recorded("sacct", "timeout"), "1")
    assert facts is not None
    assert (facts.max_rss, facts.step_states, facts.out_of_memory) == ("3404K", ("CANCELLED",), False)
    text = (
        recorded("sacct", "timeout") + "1.0|step|OUT_OF_MEMORY|0:125|x|x|x|n1||1.5G\n1.1|step|FAILED|1:0|x|x|x|n1||9M\n"
    )
    facts = parse_sacct(text, "1")
    assert facts is not None
    assert (facts.max_rss, facts.out_of_memory) == ("1.5G", True)


def test_tasks_that_wait_are_one_record_of_accounting() -> None:
    assert parse_sacct(recorded("sacct", "array-waiting"), "10_2") is None


# --- words


def test_facts_of_a_job() -> None:
    facts = parse_facts(
        "JobId=41 JobName=digits/first JobState=RUNNING Dependency=(null) Restarts=2 EndTime=2026-11-20T07:05:00"
        " Command=/shared/my run.sh --flag=a=b"
    )
    assert (facts["JobId"], facts["Restarts"], facts["EndTime"]) == ("41", "2", "2026-11-20T07:05:00")
    assert (facts["Dependency"], facts["Command"], facts["--flag"]) == ("(null)", "/shared/my", "a=b")
    assert parse_facts("") == {}


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
def test_no_time_is_none(text: str | None) -> None:
    assert parse_time(text) is None


# --- which command is asked


class Commands:
    """A folder that alone is on PATH, with scripts in Slurm's place; `asked` has what was called, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, says: str = "", *, error: str = "", code: int = 0) -> None:
        (self.folder / f"{name}.out").write_text(says)
        (self.folder / f"{name}.err").write_text(error)
        script = self.folder / name
        script.write_text(
            f'#!/bin/sh\ncd {self.folder}\necho "{name} $*" >> asked\n'
            f"while IFS= read -r line; do echo \"$line\"; done < {name}.out\n"
            f"while IFS= read -r line; do echo \"$line\" >&2; done < {name}.err\nexit {code}\n"
        )  # fmt: skip
        script.chmod(0o755)

    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setenv("PATH", str(tmp_path))
    return Commands(tmp_path)


UNKNOWN = "slurm_load_jobs error: Invalid job id specified\n"
AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
NO_ACCOUNTING = "Slurm accounting storage is disabled\n"


def test_a_job_in_the_queue_takes_one_call(commands: Commands) -> None:
    commands.add("scontrol", recorded("scontrol", "begin-time"))
    commands.add("sacct")
    facts = ask("5")
    assert facts is not None
    assert (facts.state, commands.asked()) == ("PENDING", ["scontrol"])


def test_squeue_stands_in_for_scontrol(commands: Commands) -> None:
    commands.add("squeue", (RECORDED / "squeue.txt").read_text())
    facts = ask("8")
    assert facts is not None
    assert (facts.state, commands.asked()) == ("PENDING", ["squeue"])


def test_accounting_knows_what_the_controller_has_forgotten(commands: Commands) -> None:
    commands.add("scontrol", error=UNKNOWN, code=1)
    commands.add("sacct", recorded("sacct", "node-fail"))
    facts = ask("7")
    assert facts is not None
    assert (facts.state, commands.asked()) == ("NODE_FAIL", ["scontrol", "sacct"])


@pytest.mark.parametrize("sacct", ["absent", "disabled", "knows nothing", "was not told"])
def test_a_job_that_nobody_knows_is_none(commands: Commands, sacct: str) -> None:
    commands.add("scontrol", error=UNKNOWN, code=1)
    if sacct == "disabled":
        commands.add("sacct", error=NO_ACCOUNTING, code=1)
    elif sacct != "absent":
        commands.add("sacct", recorded("sacct", "requeued") if sacct == "was not told" else "")
    assert ask("8") is None
    assert look_at(JobRef(id="8")).dead


def test_accounting_answers_for_a_controller_that_is_away(commands: Commands) -> None:
    commands.add("scontrol", error=AWAY, code=1)
    commands.add("sacct", recorded("sacct", "requeued"))
    facts = ask("8")
    assert facts is not None
    assert facts.state == "RUNNING"


def test_when_nobody_answers_it_is_a_note(commands: Commands) -> None:
    commands.add("scontrol", error=AWAY, code=1)
    commands.add("sacct", error=NO_ACCOUNTING, code=1)
    with pytest.raises(
        SlurmUnavailableError, match=r"^scontrol: slurm_load_jobs error: Unable to contact slurm controller"
    ):
        ask("8")
    look = look_at(JobRef(id="8"))
    assert (look.facts, look.dead, look.installed) == (None, False, True)
    assert look.away == "scontrol: slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def test_a_command_that_hangs_is_given_up(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_snapshot, "ANSWER_WITHIN_S", 0.2)
    commands.add("scontrol")
    path = commands.folder / "scontrol"
    path.write_text(f"#!/bin/sh\nread -r never < {commands.folder}/pipe\n")
    os.mkfifo(commands.folder / "pipe")
    assert look_at(JobRef(id="8")).away == "scontrol gave no answer in 0.2 s"


def test_without_slurm_it_is_said(commands: Commands) -> None:
    look = look_at(JobRef(id="8"))
    assert (look.away, look.installed, look.dead) == ("no squeue here", False, False)
    with pytest.raises(SlurmUnavailableError, match=r"^no squeue here$"):
        ask_many(["8"])
    with pytest.raises(SlurmUnavailableError, match=r"^no scancel here$"):
        job_snapshot.cancel("8")


def test_history_is_asked_of_accounting_too(commands: Commands) -> None:
    commands.add("scontrol", recorded("scontrol", "requeued"))
    commands.add("sacct", recorded("sacct", "requeued"))
    facts = ask("8", history=True)
    assert facts is not None
    assert (facts.state, facts.reason, facts.earlier) == ("PENDING", "BeginTime", ("REQUEUED",))
    commands.add("sacct", error=NO_ACCOUNTING, code=1)
    facts = ask("8", history=True)
    assert facts is not None
    assert (facts.state, facts.earlier) == ("PENDING", ())


def test_many_jobs_take_one_call(commands: Commands) -> None:
    commands.add("squeue", (RECORDED / "squeue.txt").read_text())
    found = ask_many(["1", "10_2", "99"])
    assert {job: facts.state for job, facts in found.items()} == {"1": "RUNNING", "10_2": "PENDING"}
    assert commands.asked() == ["squeue"]
    assert ask_many([]) == {}
    commands.add("squeue", error=UNKNOWN, code=1)
    assert ask_many(["99"]) == {}


# --- which job it is


def test_another_job_of_the_same_id_does_not_count(commands: Commands) -> None:
    commands.add("scontrol", recorded("scontrol", "running"))
    assert look_at(JobRef(id="1", name="timeout")).facts is not None
    other = look_at(JobRef(id="1", name="digits/first"))
    assert (other.facts, other.dead) == (None, True)


def test_a_job_of_another_cluster_is_not_taken_for_dead(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    commands.add("scontrol", "SlurmctldPort = 6817\nClusterName             = here\n")
    assert job_snapshot.cluster_name() == "here"
    monkeypatch.setattr(job_snapshot, "ask", lambda job, history: None)
    assert look_at(JobRef(id="1", cluster="here")) == JobSnapshot()
    away = look_at(JobRef(id="1", cluster="there"))
    assert (away.away, away.dead) == ("job 1 is on cluster there, this is here", False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"state": "PENDING", "submitted": 100.0, "started": 900.0}, 50.0),
        ({"state": "RUNNING", "submitted": 100.0, "started": 130.0}, 30.0),
        ({"state": "COMPLETED", "submitted": 100.0, "started": 99.0}, 0.0),
        ({"state": "CANCELLED", "submitted": 100.0}, None),
    ],
)
def test_the_time_in_the_queue(changes: dict[str, Any], expected: float | None) -> None:
    assert JobInfo(id="1", **changes).queue_s(150.0) == expected


# --- other releases, and lines of another form


@pytest.mark.parametrize("release", ["24_11", "26_05"])
def test_newer_releases(release: str) -> None:
    def text(command: str, name: str) -> str:
        whole = (RECORDED.parent / f"slurm_{release}" / f"{command}.txt").read_text()
        return whole.partition(f"### {name}\n")[2].partition("###")[0]

    def sentence(facts: JobInfo | None) -> str:
        assert facts is not None
        return facts.sentence()

    assert sentence(parse_scontrol(text("scontrol", "1"), "1")) == "job 1 is RUNNING on n[1-2]"
    assert sentence(parse_scontrol(text("scontrol", "2_1"), "2_1")) == "job 2_1 ended as FAILED with exit code 3 on n1"
    assert sentence(parse_scontrol(text("scontrol", "3"), "3")) == "job 3 is RUNNING on n1,n2"
    assert sentence(parse_scontrol(text("scontrol", "requeued"), "1")) == "job 1 waits (BeginTime)"
    assert sentence(parse_squeue(text("squeue", "2"), "2_1")) == "job 2_1 ended as FAILED on n1"
    assert sentence(parse_sacct(text("sacct", "1"), "1")) == "job 1 ended as CANCELLED on n[2-3]"
    past = parse_sacct(text("sacct", "1"), "1")
    assert past is not None
    assert past.earlier == ("REQUEUED",)


def test_free_text_at_the_end_of_a_record_overrides_no_key() -> None:
    line = "JobId=1 JobName=a JobState=RUNNING NodeList=n1 SubmitLine=sbatch --wrap=x JobState=FAILED NodeList=n9"
    facts = parse_scontrol(line, "1")
    assert facts is not None
    assert (facts.state, facts.nodes) == ("RUNNING", "n1")


def test_lines_of_another_form_are_left_out() -> None:
    facts = parse_scontrol(f"JobId=1 Restarts=x ExitCode={'9' * 5000}:0", "1")
    assert facts is not None
    assert (facts.state, facts.restarts, facts.exit_code) == ("UNKNOWN", 0, 0)
    assert parse_squeue("slurm_load_jobs error\n1|RUNNING\n", "1") is None
    assert parse_sacct("1\n1|a|b\n", "1") is None
    rows = "1|a|COMPLETED|0:0|x|x|x|n1|1|\n1.0|s|COMPLETED|0:0|x|x|x|n1|1|1.2.3K\n"
    facts = parse_sacct(rows, "1")
    assert facts is not None
    assert facts.max_rss == "1.2.3K"
    assert parse_time("9999-12-31T23:59:59") is not None
