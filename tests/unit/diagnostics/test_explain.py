"""What `hpcdist explain` makes of a run folder and of Slurm's word."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcdist.diagnostics.explain import explain
from hpcdist.files.atomic import write_json
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import hold
from hpcdist.slurm import job_snapshot
from hpcdist.slurm.job_info import JobInfo
from hpcdist.slurm.job_snapshot import JobSnapshot

GLOO_PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:18064"


@pytest.fixture
def run(runs_dir: Path) -> RunDir:
    run = RunDir.create(runs_dir / "exp" / "first")
    run.new_attempt()
    run.write_state(replace(run.read_state(), status="failed", attempt=1, reason="so it is"))
    return run


@pytest.fixture
def slurm(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the run job 7 and sets what Slurm says of it."""

    def says(state: str, **facts: Any) -> None:
        write_json(run.path / "slurm.json", {"job_id": "7"})
        look = JobSnapshot(info=JobInfo(id="7", state=state, **facts))
        monkeypatch.setattr(job_snapshot, "take_snapshot", lambda job, history=False: look)

    return says


def put(run: RunDir, **changes: Any) -> None:
    run.write_state(replace(run.read_state(), **changes))


def outcome(
    run: RunDir, rank: int, error: str, *trace: str, kind: str = "failed", at: float = 1.0, peer: bool = False
) -> None:
    value = {"outcome": kind, "rank": rank, "host": "n1", "time": at, "step": 5, "error": error, "peer_lost": peer}
    write_json(run.attempt(1).outcome(rank), value | {"traceback": [f"{line}\n" for line in trace]})


def log(run: RunDir, rank: int, text: str) -> None:
    run.attempt(1).log(rank).write_text(text)


def rows(run: RunDir) -> dict[str, str]:
    lines = explain(run)
    assert len(lines) <= 5
    return {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}


# --- nothing is wrong


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ({"status": "finished", "reason": "trained 9 steps"}, "finished: trained 9 steps; nothing to explain"),
        (
            {"status": "finished", "reason": "trained 9 steps", "restarts": 1},
            "finished after 1 restart: trained 9 steps; nothing to explain",
        ),
        (
            {"status": "created", "attempt": 0, "reason": ""},
            "created, but never started; `hpcdist resume first` starts it",
        ),
    ],
    ids=["finished", "restarted", "created"],
)
def test_nothing_to_explain(run: RunDir, state: dict[str, Any], line: str) -> None:
    put(run, **state)
    assert explain(run) == [line]


def test_a_run_at_work(run: RunDir) -> None:
    put(run, status="running", reason="")
    write_json(run.attempt(1).beat(0), {})
    with hold(run):
        assert explain(run) == ["running; nothing to explain"]
        os.utime(run.attempt(1).beat(0), (0, time.time() - 100))
        assert explain(run)[0].startswith("running; nothing to explain (but rank 0 sent its last heartbeat 10")


def test_what_the_last_restart_was_for(run: RunDir) -> None:
    outcome(run, 0, "ValueError: nan")
    run.new_attempt()
    put(run, status="running", attempt=2, restarts=1, reason="")
    with hold(run):
        found = rows(run)
    assert (found["status"], found["evidence"]) == ("running", "attempts/001/rank-00000.outcome.json: ValueError: nan")


def test_who_held_the_others_up_goes_last(run: RunDir) -> None:
    put(run, status="finished", reason="trained 9 steps")
    told = [
        {"role": "trainer", "name": "n1", "event": "slow", "text": "n1 is slow"},
        {"role": "trainer", "name": "n3", "event": "slow", "text": "n3 is 30 % slower"},
        {"role": "trainer", "name": "n1", "event": "over", "text": "n1 is as fast again"},
        {"role": "trainer", "name": "n3", "event": "slow", "text": "n3 is 60 % slower"},
    ]
    lines = "".join(json.dumps(line) + "\n" for line in told)
    run.attempt(1).stragglers.write_text(lines + '{"role": "tra')
    assert explain(run) == ["finished: trained 9 steps; nothing to explain", "slow:     n3 is 60 % slower"]


# --- the ranks' own word


def test_an_exception_of_the_users_own(run: RunDir) -> None:
    frames = ["Traceback (most recent call last):", '  File "/me/train.py", line 7, in step', "    raise ValueError(x)"]
    outcome(run, 0, GLOO_PEER, peer=True, at=1.0)
    outcome(run, 1, "ValueError: loss is nan", *frames, "ValueError: loss is nan", at=2.0)
    log(run, 1, "[W] Address already in use, trying the next\nstep 4\n2026 ERROR\nValueError: loss is nan\n")
    assert rows(run) == {
        "status": "failed: so it is",
        "cause": 'an exception in the training code, at File "/me/train.py", line 7, in step',
        "evidence": "attempts/001/rank-00001.log:4: ValueError: loss is nan",
        "fix": "fix the code, then `hpcdist resume first --with-current-code`",
    }


def test_a_known_error_of_a_rank(run: RunDir) -> None:
    error = "CheckpointError: saving to /runs/x failed: OSError: [Errno 28] No space left on device"
    outcome(run, 0, error)
    log(run, 0, f"step 1\n2026-11-20 08:00:00 ERROR rank 0 on n1: {error}\n")
    found = rows(run)
    assert found["cause"] == "a disk is full, or a quota is exceeded"
    assert found["evidence"].startswith("attempts/001/rank-00000.log:2: 2026-11-20 08:00:00 ERROR rank 0 on n1: Checkp")


def test_a_rejected_config(run: RunDir) -> None:
    outcome(run, 0, "checkpoint.monitor='x' is not measured: use one of train/loss", kind="rejected")
    put(run, rejected=True)
    found = rows(run)
    assert found["cause"] == "the configuration cannot run on these nodes"
    assert found["evidence"].endswith("outcome.json: checkpoint.monitor='x' is not measured: use one of train/loss")
    assert found["fix"] == "correct the key, then `hpcdist resume first key=value …`"


def test_a_trainer_whose_module_is_missing_is_more_than_a_mistake(run: RunDir) -> None:
    error = "trainer 'mine:train' cannot be imported: ModuleNotFoundError: No module named 'einops'"
    outcome(run, 0, error, kind="rejected")
    assert rows(run)["cause"] == "the ranks' Python does not find einops"


# --- a rank that left no word


def test_a_killed_rank_and_what_slurm_printed(run: RunDir) -> None:
    put(run, reason="rank 3 on n2 was killed by SIGKILL (out of memory?) at step 9")
    outcome(run, 0, GLOO_PEER, peer=True)
    log(run, 0, f"{GLOO_PEER}\n")
    found = rows(run)
    assert found["cause"].startswith("the rank was killed from outside")
    (run.attempt(1).path / "srun.log").write_text(
        "srun: error: n2: task 3: Out Of Memory\nslurmstepd: error: Detected 1 oom_kill event in StepId=7.0\n"
    )
    found = rows(run)
    assert found["cause"] == "the host's memory, or the job's share of it, is exhausted"
    assert found["evidence"] == "attempts/001/srun.log:1: srun: error: n2: task 3: Out Of Memory"


def test_a_hang_shows_where_the_first_rank_stood(run: RunDir) -> None:
    put(run, reason="rank 1 on n1 made no progress for launch.hang_timeout_s=15 s (stack traces of all ranks are in …)")
    stack = (
        'Thread 0x1 (most recent call first):\n  File "a.py", line 1\nCurrent thread 0x2 (most recent call first):\n'
    )
    log(run, 1, f"step 3\n{stack}  File \"train.py\", line 40 in wait\n")  # fmt: skip
    found = rows(run)
    assert found["cause"] == "the ranks hung"
    assert found["evidence"] == 'attempts/001/rank-00001.log:5: File "train.py", line 40 in wait'


def test_a_hang_shows_who_stood_elsewhere_than_the_others(run: RunDir) -> None:
    """Also where the supervisor's own words about it are in the job's log, which is searched first."""
    put(run, reason="rank 1 on n1 made no progress for launch.hang_timeout_s=15 s (stack traces of all ranks are in …)")
    (run.path / "submitit").mkdir()
    (run.path / "submitit" / "7_0_log.out").write_text("rank 1 on n1 made no progress for launch.hang_timeout_s=15 s\n")
    run.attempt(1).stacks_summary.write_text("rank 1 differs from the others: in wait (a.py:3)\n\nmore\n")
    found = rows(run)
    assert found["cause"] == "the ranks hung: rank 1 differs from the others: in wait (a.py:3)"
    assert found["evidence"].startswith("attempts/001/stacks.txt, and each rank's stack trace in attempts/001/rank-*")
    # What made it hang may stand in a log.
    log(run, 0, "OSError: [Errno 28] No space left on device\n")
    assert rows(run)["cause"] == "a disk is full, or a quota is exceeded"


def test_only_peers_were_lost(run: RunDir) -> None:
    outcome(run, 0, GLOO_PEER, peer=True)
    log(run, 0, f"{GLOO_PEER}\n")
    assert rows(run)["cause"] == "another rank died first without an error message"


def test_nothing_was_left(run: RunDir) -> None:
    found = rows(run)
    assert (found["cause"], found["evidence"]) == ("so it is", f"logs in {run.path}/attempts")


def test_a_supervisor_that_was_killed(run: RunDir) -> None:
    put(run, status="running", reason="")
    found = rows(run)
    assert (found["status"], found["cause"]) == ("lost", "its supervisor was killed")


# --- Slurm's word


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("OUT_OF_MEMORY", "the job used more memory than it requested"),
        ("TIMEOUT", "the job reached its time limit before the ranks had saved"),
        ("NODE_FAIL", "a node failed"),
        ("PREEMPTED", "a job of higher priority preempted this one"),
        ("CANCELLED", "the job was cancelled (scancel, by the user or an administrator)"),
    ],
)
def test_how_a_job_ended(run: RunDir, slurm: Callable[..., None], state: str, cause: str) -> None:
    put(run, status="running", reason="")
    slurm(state, nodes="n1", max_rss="3404K", submitted=100.0, started=130.0)
    assert rows(run) | {"fix": ""} == {
        "status": f"lost: job 7 ended as {state} on n1",
        "cause": cause,
        "evidence": f"Slurm: job 7 ended as {state} on n1, MaxRSS 3404K",
        "fix": "",
        "slurm": f"job 7 ended as {state} on n1, 0:00:30 in the queue",
    }


def test_a_step_that_was_out_of_memory(run: RunDir, slurm: Callable[..., None]) -> None:
    slurm("FAILED", exit_code=1, nodes="n1", step_states=("CANCELLED", "OUT_OF_MEMORY"))
    assert rows(run)["cause"] == "the job used more memory than it requested"


def test_a_job_that_was_cancelled_after_its_run_had_failed_explains_nothing(
    run: RunDir, slurm: Callable[..., None]
) -> None:
    outcome(run, 0, "ValueError: nan")
    slurm("CANCELLED", nodes="n1")
    assert rows(run)["cause"] == "an exception in the training code"


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("Priority", "jobs of higher priority run first (Priority)"),
        ("ReqNodeNotAvail,_UnavailableNodes:n4", "requested nodes are down or reserved (ReqNodeNotAvail,"),
        ("AssocGrpCpuLimit", "a limit of the account or quality of service is reached (AssocGrpCpuLimit)"),
        ("Cleaning", "Cleaning"),
    ],
)
def test_why_a_job_waits(run: RunDir, slurm: Callable[..., None], reason: str, cause: str) -> None:
    put(run, status="queued", reason="")
    slurm("PENDING", reason=reason)
    found = rows(run)
    assert found["status"] == "queued"
    assert found["cause"].startswith(cause)
    assert found["slurm"].startswith(f"job 7 waits ({reason})")


def test_a_job_that_never_came_so_far_as_to_an_attempt(run: RunDir, slurm: Callable[..., None]) -> None:
    put(run, status="failed", attempt=0, reason="job 7 ended as FAILED with exit code 1 on n1")
    slurm("FAILED", exit_code=1, nodes="n1")
    (run.path / "submitit").mkdir()
    (run.path / "submitit" / "7_0_log.out").write_text("Traceback\nModuleNotFoundError: No module named 'submitit'\n")
    found = rows(run)
    assert found["cause"] == "the ranks' Python does not find submitit"
    assert found["evidence"] == "submitit/7_0_log.out:2: ModuleNotFoundError: No module named 'submitit'"


def test_what_someone_asked_for(run: RunDir) -> None:
    put(run, status="stopped", reason="stopped with everything saved (`hpcdist stop` by ada)")
    found = rows(run)
    assert found["cause"] == "stopped with everything saved (`hpcdist stop` by ada)"
    assert found["fix"] == "`hpcdist resume first` continues from the newest checkpoint"


# --- nodes that are not fit


def test_a_node_that_is_not_fit_is_the_cause_with_the_preflights_own_fix(run: RunDir) -> None:
    reason = "preflight: n3: disk: no space left on device; remove old runs"
    disk = {"name": "disk", "level": "failure", "node": "n3", "text": "no space left on device", "fix": "remove old"}
    clock = {"name": "clock", "level": "warning", "node": "n2", "text": "2 s ahead", "fix": "start chronyd"}
    write_json(run.attempt(1).preflight, {"checks": [clock, disk]})
    put(run, reason=reason)
    assert rows(run) == {
        "status": f"failed: {reason}",
        "cause": "n3 is unfit for a run: disk: no space left on device",
        "evidence": "attempts/001/preflight.txt, before the ranks started",
        "fix": "remove old",
    }
    write_json(run.attempt(1).preflight, {"checks": [disk | {"node": "", "text": "on all 4 nodes: full"}]})
    assert rows(run)["cause"] == "the nodes are unfit for a run: disk: on all 4 nodes: full"
