"""Causes of failed and waiting runs, and the patterns of known failures."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hpcdist
from hpcdist.host.json_files import write_json
from hpcdist.review.explain import explain, explain_attempt
from hpcdist.review.known_failures import PATTERNS, first_match
from hpcdist.run.attempt_times import AttemptTimes, write_times
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import hold
from hpcdist.run.status import close_if_lost
from hpcdist.slurm import client
from hpcdist.slurm.client import JobSnapshot
from hpcdist.slurm.output import JobInfo, NodeGroup, Partition, SlurmError
from hpcdist.slurm.reservations import Reservation

EARLY = "ended with exit status 0 before the other ranks"
GLOO_PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:18064"


@pytest.fixture
def run(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(runs_dir.parent)
    run = RunDir.create(runs_dir / "exp" / "first")
    run.new_attempt()
    run.write_state(replace(run.read_state(), status="failed", attempt=1, reason="rank 0 failed"))
    return run


@pytest.fixture
def slurm(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes the run job 7 and sets the job's state in Slurm."""

    def set_state(state: str, **facts: Any) -> None:
        write_json(run.path / "slurm.json", {"job_id": "7"})
        snapshot = JobSnapshot(info=JobInfo(id="7", state=state, **facts))
        monkeypatch.setattr(client, "take_snapshot", lambda job, history=False: snapshot)
        monkeypatch.setattr(client, "job_record", no_answer)

    return set_state


def no_answer(job_id: str) -> dict[str, str]:
    raise SlurmError(f"no answer about job {job_id}")


def change_state(run: RunDir, **changes: Any) -> None:
    run.write_state(replace(run.read_state(), **changes))


def write_outcome(
    run: RunDir, rank: int, error: str, *trace: str, kind: str = "failed", at: float = 1.0, peer: bool = False
) -> None:
    value = {"outcome": kind, "rank": rank, "host": "n1", "time": at, "step": 5, "error": error, "peer_lost": peer}
    write_json(run.attempt(1).outcome(rank), value | {"traceback": [f"{line}\n" for line in trace]})


def write_log(run: RunDir, rank: int, text: str) -> None:
    run.attempt(1).log(rank).write_text(text)


def explained(run: RunDir) -> dict[str, str]:
    """Return the lines of the explanation by their name."""
    lines = explain(run).lines
    assert len(lines) <= 5
    return {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}


def test_healthy_run_has_one_line(run: RunDir) -> None:
    change_state(run, status="finished", reason="trained 9 steps")
    assert explain(run).lines == ["finished: trained 9 steps; nothing to explain"]
    change_state(run, status="running", reason="")
    write_json(run.attempt(1).beat(0), {})
    with hold(run):
        assert explain(run).lines == ["running; nothing to explain"]
        os.utime(run.attempt(1).beat(0), (0, time.time() - 100))
        assert explain(run).sentence.startswith("running; nothing to explain (but rank 0 sent its last heartbeat 10")
        run.attempt(1).silence.write_text("all ranks are in all_reduce")
        assert explain(run).lines == [
            "running; nothing to explain (but once it made no progress for launch.hang_timeout_s; stacks:"
            " attempts/001/silence.txt)"
        ]
    change_state(run, status="created", attempt=0)
    for folder, named in ((".", "first"), ("runs", "exp/first"), ("/usr", str(run.path))):
        os.chdir(folder)
        assert explain(run).lines == [f"created, but never started; `hpcdist resume {named}` starts it"]


def test_killed_rank_is_the_cause_and_not_its_peer(run: RunDir) -> None:
    """The killed rank has written no outcome; its peer has. The attempt after it ended with a requeue."""
    killed = "rank 1 on n1 was killed by SIGKILL, last heartbeat at step 161"
    times = AttemptTimes(supervised=1.0, began=2.0, ended=3.0)
    write_outcome(run, 0, GLOO_PEER, peer=True)
    write_log(run, 0, f"{GLOO_PEER}\n")
    write_json(run.attempt(1).failure, {"kind": "killed", "rank": 1, "host": "n1", "error": "was killed by SIGKILL"})
    write_times(run.attempt(1), replace(times, failed=True, status="failed", reason=killed))
    write_times(run.new_attempt(), replace(times, failed=False))
    run.new_attempt()
    change_state(run, status="running", attempt=3, restarts=1, reason="")
    with hold(run):
        found = explained(run)
    assert found["evidence"] == killed
    assert found["cause"].startswith("the rank was killed from outside")
    for number in (2, 3):
        write_times(run.attempt(number), replace(times, status="finished", reason="trained 9 steps"))
    change_state(run, status="finished", reason="trained 9 steps")
    assert explain(run).lines == [
        *("finished after 1 restart: trained 9 steps", f"1:        interrupted: {killed}; 5 steps lost"),
        *(f"{name + ':':<10}{found[name]}" for name in ("cause", "fix")),
    ]
    write_json(run.attempt(3).failure, {"kind": "vanished", "rank": 1, "host": "n1", "step": 5, "error": EARLY})
    change_state(run, status="failed", reason=f"rank 1 on n1 {EARLY} after step 5")
    found = explained(run)
    assert (found["cause"], found["evidence"]) == (f"rank 1 on n1 {EARLY} after step 5", "logs in attempts/003")


def test_current_stragglers_and_errors_of_gpus_come_last(run: RunDir) -> None:
    change_state(run, status="finished", reason="trained 9 steps")
    events = [
        {"role": "trainer", "name": "n1", "event": "slow", "text": "n1 is slow"},
        {"role": "trainer", "name": "n3", "event": "slow", "text": "n3 is 30 % slower"},
        {"role": "trainer", "name": "n1", "event": "over", "text": "n1 is no longer slow"},
        {"role": "trainer", "name": "n3", "event": "slow", "text": "n3 is 60 % slower"},
    ]
    lines = "".join(json.dumps(line) + "\n" for line in events)
    run.attempt(1).stragglers.write_text(lines + '{"role": "tra')
    write_log(run, 2, "12:00:01 WARNING rank 2 on n2: GPU 7 reported Xid 94\nGPU 7 reported Xid 31\n")
    expected = ["slow:     n3 is 60 % slower", "gpu:      n2: GPU 7 reported Xid 94"]
    assert explain(run).lines == ["finished: trained 9 steps; nothing to explain", *expected]


def test_exception_in_user_code_has_its_frame_and_log_line(run: RunDir) -> None:
    frames = ["Traceback (most recent call last):", '  File "/me/train.py", line 7, in step', "    raise ValueError(x)"]
    write_outcome(run, 0, GLOO_PEER, peer=True, at=1.0)
    write_outcome(run, 1, "ValueError: loss is nan", *frames, "ValueError: loss is nan", at=2.0)
    write_log(run, 1, "[W] Address already in use, trying the next\nstep 4\n2026 ERROR\nValueError: loss is nan\n")
    assert explained(run) == {
        "status": "failed: rank 0 failed",
        "cause": 'an exception in the training code, at File "/me/train.py", line 7, in step',
        "evidence": "attempts/001/rank-00001.log:4: ValueError: loss is nan",
        "fix": "correct /me/train.py:7, then `hpcdist resume first --with-current-code`",
    }
    # Clocks of nodes differ; the supervisor knows which rank ended first.
    write_outcome(run, 2, "ValueError: first", at=3.0)
    error = {"kind": "error", "rank": 2, "host": "n1", "step": 5, "error": "ValueError: first"}
    write_json(run.attempt(1).failure, error)
    assert explained(run)["evidence"].endswith("ValueError: first")


SHIPPED = Path(hpcdist.__file__).parent / "trainers" / "ddp" / "train.py"


def test_error_in_the_users_code_names_the_line_to_fix(run: RunDir) -> None:
    library, shipped = "/env/lib/python3.12/site-packages/torch/nn.py", str(SHIPPED)
    syntax_error = "trainer 'a:train' cannot be imported: SyntaxError: invalid syntax (b.py, line 2)"
    raised = "an exception in the training code, at File"
    for kind, error, frames, cause, place in (
        ("failed", "ValueError: bad", ["/me/train.py", library], f'{raised} "/me/train.py", line 1', "/me/train.py:1"),
        ("failed", "ValueError: bad", ["/usr/lib/python3.12/runpy.py", shipped], f'{raised} "{shipped}"', ""),
        ("failed", "A: b", ["/me/m.py", "/tmp/torchinductor_0/z/c.py"], f'{raised} "/me/m.py", line 1', "/me/m.py:1"),
        ("rejected", syntax_error, ["/me/a.py", "/me/b.py"], "a syntax error in /me/b.py:2", "/me/b.py:2"),
    ):
        trace = [f'  File "{path}", line {number}' for number, path in enumerate(frames, 1)]
        write_outcome(run, 0, error, "Traceback (most recent call last):", *trace, error, kind=kind)
        found = explained(run)
        assert found["cause"].startswith(cause)
        assert found["fix"] == f"correct {place or 'the code'}, then `hpcdist resume first --with-current-code`"
        finding = explain_attempt(run, run.attempt(1), read_logs=False)
        assert finding is not None
        assert finding.code == place


def test_rejected_config_names_its_key(run: RunDir) -> None:
    write_outcome(run, 0, "checkpoint.monitor='x' is not measured: use one of train/loss", kind="rejected")
    change_state(run, rejected=True)
    found = explained(run)
    assert found["cause"] == "the configuration cannot run on these nodes"
    assert found["evidence"].endswith("outcome.json: checkpoint.monitor='x' is not measured: use one of train/loss")
    assert found["fix"] == "correct the key, then `hpcdist resume first key=value …`"
    error = "CheckpointError: saving to /runs/x failed: OSError: [Errno 28] No space left on device"
    write_outcome(run, 0, error)
    write_log(run, 0, f"step 1\n2026-11-20 08:00:00 ERROR rank 0 on n1: {error}\n")
    found = explained(run)
    assert found["cause"] == "a disk is full, or a quota is exceeded"
    assert found["evidence"].startswith("attempts/001/rank-00000.log:2: 2026-11-20 08:00:00 ERROR rank 0 on n1: Checkp")


def test_refused_arguments_of_a_script_are_no_error_in_its_code(run: RunDir) -> None:
    reason = "train.py: error: argument --lr: invalid float value: 'high'"
    error = f"RuntimeError: /me/train.py ended with exit status 2; its last line: {reason}"
    in_script = '  File "/me/train.py", line 3, in <module>'
    trace = [in_script, '  File "/usr/lib/python3.12/argparse.py", line 2617, in exit']
    write_outcome(run, 0, error, "Traceback (most recent call last):", *trace, error)
    found = explained(run)
    assert found["cause"] == f"the script refuses its arguments: {reason}"
    overrides = "'trainer.script=[FILE, ARGUMENT, …]'"
    assert found["fix"] == f"correct the arguments, then `hpcdist resume first {overrides}`"
    of_trainer = error.replace("/me/train.py", "train:main")
    write_outcome(run, 0, of_trainer, "Traceback (most recent call last):", *trace, of_trainer)
    assert explained(run)["fix"].startswith("correct /me/train.py:3, then"), "a trainer gets no arguments"
    # The script's own exit with this status may mean anything.
    write_outcome(run, 0, error, "Traceback (most recent call last):", in_script, error)
    assert explained(run)["fix"].startswith("correct /me/train.py:3, then")


def test_killed_rank_is_explained_by_messages_of_slurm(run: RunDir) -> None:
    change_state(run, reason="rank 3 on n2 was killed by SIGKILL, last heartbeat at step 9")
    write_outcome(run, 0, GLOO_PEER, peer=True)
    write_log(run, 0, f"{GLOO_PEER}\n")
    found = explained(run)
    assert found["cause"].startswith("the rank was killed from outside")
    (run.attempt(1).path / "srun.log").write_text(
        "srun: error: n2: task 3: Out Of Memory\nslurmstepd: error: Detected 1 oom_kill event in StepId=7.0\n"
    )
    found = explained(run)
    assert found["cause"] == "the host's memory, or the job's share of it, is exhausted"
    assert found["evidence"] == "attempts/001/srun.log:1: srun: error: n2: task 3: Out Of Memory"


def test_hang_shows_the_rank_whose_stack_differs(run: RunDir) -> None:
    """The summary of the stacks takes precedence over the supervisor's message in the job's log."""
    hung = "rank 1 on n1 made no progress for launch.hang_timeout_s=15 s"
    change_state(run, reason=f"{hung} (stack traces of all ranks are in …)")
    found = explained(run)
    assert (found["cause"], found["evidence"]) == ("the ranks hung", f"{hung} (stack traces of all ranks are in …)")
    (run.path / "submitit").mkdir()
    (run.path / "submitit" / "7_0_log.out").write_text(f"{hung}\n")
    run.attempt(1).stacks_summary.write_text("rank 1 differs from the others: in wait (a.py:3)\n\nmore\n")
    found = explained(run)
    assert found["cause"] == "the ranks hung: rank 1 differs from the others: in wait (a.py:3)"
    assert found["evidence"].startswith("attempts/001/stacks.txt, and each rank's stack trace in attempts/001/rank-*")
    # A log may contain the reason for the hang.
    write_log(run, 0, "OSError: [Errno 28] No space left on device\n")
    assert explained(run)["cause"] == "a disk is full, or a quota is exceeded"


def test_lost_peer_is_the_cause_if_nothing_else_is_known(run: RunDir) -> None:
    found = explained(run)
    assert (found["cause"], found["evidence"]) == ("rank 0 failed", "logs in attempts/001")
    change_state(run, reason=f"rank 0 on n1 failed with {GLOO_PEER}")
    write_outcome(run, 0, GLOO_PEER, peer=True)
    write_log(run, 0, f"{GLOO_PEER}\n")
    assert explained(run)["cause"] == "the ranks lost their connection, and none of them reported another cause"


def test_killed_supervisor_is_the_cause_of_a_lost_run(run: RunDir) -> None:
    change_state(run, status="running", reason="")
    found = explained(run)
    assert (found["status"], found["cause"]) == ("lost", "its supervisor was killed")
    close_if_lost(run)
    found = explained(run)
    assert (found["status"], found["cause"]) == ("failed: its supervisor died", "its supervisor died")
    assert "evidence" not in found


def test_final_job_state_is_the_cause_of_a_lost_run(run: RunDir, slurm: Callable[..., None]) -> None:
    change_state(run, status="running", reason="")
    for state, cause in (
        ("NODE_FAIL", "a node failed"),
        ("PREEMPTED", "a job of higher priority preempted this one"),
        ("CANCELLED", "the job was cancelled (scancel, by the user or an administrator)"),
    ):
        slurm(state, nodes="n1", submitted=100.0, started=130.0)
        assert explained(run) | {"fix": ""} == {
            "status": f"lost: job 7 ended as {state} on n1",
            "cause": cause,
            "evidence": f"Slurm: job 7 ended as {state} on n1",
            "fix": "",
            "slurm": f"job 7 ended as {state} on n1, 30 s in the queue",
        }


def test_out_of_memory_is_the_cause_and_a_later_scancel_is_not(run: RunDir, slurm: Callable[..., None]) -> None:
    slurm("FAILED", exit_code=1, nodes="n1", step_states=("CANCELLED", "OUT_OF_MEMORY"))
    assert explained(run)["cause"] == "the job used more memory than it requested"
    write_outcome(run, 0, "ValueError: nan")
    assert explained(run)["cause"] == "an exception in the training code", "what the rank has reported counts"
    write_outcome(run, 0, GLOO_PEER, peer=True)
    assert explained(run)["cause"] == "the job used more memory than it requested", "a lost peer is no cause"
    write_outcome(run, 0, "ValueError: nan")
    slurm("CANCELLED", nodes="n1")
    assert explained(run)["cause"] == "an exception in the training code"


def test_out_of_memory_names_whose_limit_was_exceeded(run: RunDir, slurm: Callable[..., None]) -> None:
    """What the kernel has counted is more specific than what Slurm says in its log and in its accounting."""
    slurm("OUT_OF_MEMORY", signal=125, nodes="n1", step_states=("OUT_OF_MEMORY",))
    (run.attempt(1).path / "srun.log").write_text("srun: error: n1: task 0: Out Of Memory\n")
    for limit, cause, fix in (
        ("with a limit of 9 MiB for the Slurm step", "the processes of the Slurm step on a node", "request more"),
        ("with a limit of 9 MiB for the Slurm job", "the processes of the Slurm job on a node", "request more"),
        ("with a limit of 9 MiB for the container", "the processes of the container", "start the container with"),
        ("with a limit of 9 MiB for the control group", "the processes needed more", "raise the limit"),
        ("since all 15,000 MiB of the machine were in use", "the machine's memory is exhausted", "end other programs"),
    ):
        error = f"was killed by the kernel: out of memory, {limit}"
        write_json(run.attempt(1).failure, {"kind": "out_of_memory", "rank": 0, "host": "n1", "error": error})
        found = explained(run)
        assert found["cause"].startswith(cause)
        assert found["fix"].startswith(fix)
        assert found["evidence"] == f"attempts/001/failure.json: {error}"


def test_error_about_a_killed_worker_is_explained_by_memory(run: RunDir) -> None:
    error = "RuntimeError: DataLoader worker (pid 31) is killed by signal: Killed."
    clause = (
        "the kernel killed a child process of rank 0 on n1: out of memory, with a limit of 9 MiB for the Slurm step"
    )
    write_outcome(run, 0, error)
    record = {"kind": "error", "rank": 0, "host": "n1", "error": error, "memory": clause}
    write_json(run.attempt(1).failure, record)
    assert explained(run)["evidence"] == f"attempts/001/failure.json: {clause}"
    for other in ("ValueError: nan", "ValueError: the loss differs by 1e-9"):
        write_outcome(run, 0, other)
        write_json(run.attempt(1).failure, {**record, "error": other})
        assert explained(run)["cause"] == "an exception in the training code", "says nothing about a process"


def test_finished_run_out_of_memory_by_accounting(run: RunDir, slurm: Callable[..., None]) -> None:
    change_state(run, status="finished", reason="trained 9 steps")
    slurm("OUT_OF_MEMORY", signal=125, nodes="n1")
    found = explained(run)
    assert found["status"] == "finished: trained 9 steps"
    assert found["cause"].endswith("the kernel killed a process, but the ranks have ended with success")
    assert found["evidence"] == (
        "Slurm: job 7 ended as OUT_OF_MEMORY (0:125, Slurm's exit code for a process that was killed for lack of"
        " memory) on n1"
    )


def test_pending_reason_is_explained(run: RunDir, slurm: Callable[..., None]) -> None:
    change_state(run, status="queued", reason="")
    for reason, cause in (
        ("Priority", "jobs of higher priority run first (Priority)"),
        ("ReqNodeNotAvail,_UnavailableNodes:n4", "requested nodes are down or reserved (ReqNodeNotAvail,"),
        (
            "ReqNodeNotAvail,_Reserved_for_maintenance",
            "a maintenance begins before the job could end (ReqNodeNotAvail,",
        ),
        (
            "ReqNodeNotAvail, Reserved for maintenance",
            "a maintenance begins before the job could end (ReqNodeNotAvail,",
        ),
        (
            "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved",
            "too few suitable nodes are up and not reserved (Nodes",
        ),
        ("Reservation", "its reservation has not begun, or is in use (Reservation)"),
        ("AssocGrpCpuLimit", "a limit of the account or quality of service is reached (AssocGrpCpuLimit)"),
        ("Cleaning", "Cleaning"),
    ):
        slurm("PENDING", reason=reason)
        found = explained(run)
        assert found["status"] == "queued"
        assert found["cause"].startswith(cause)
        assert found["slurm"].startswith(f"job 7 waits ({reason})")


MAIN = Partition(
    name="main",
    facts={"MaxTime": "00:30:00"},
    nodes=(NodeGroup(partition="main", num_nodes=4, cpus=8, memory_mb=1, gpus=0, usable=True, names="n[1-4]"),),
)


@pytest.mark.parametrize(
    ("reason", "begins_in_min", "cause", "fix"),
    [
        (
            "ReqNodeNotAvail,_Reserved_for_maintenance",
            30,
            "the job needs 60 min, and maintenance maint begins in 30 min on all nodes (ReqNodeNotAvail,_Reserved_for_",
            "`scontrol update JobId=7 TimeLimit=25` lets it end before that (the run requeues itself); otherwise wait",
        ),
        (
            "ReqNodeNotAvail,_Reserved_for_maintenance",
            4,
            "the job needs 60 min, and maintenance maint begins in 4 min on all nodes",
            "wait for the end of the reservation at 20",
        ),
        ("Resources", 90, "no suitable nodes are free (Resources)", "wait, or request fewer nodes"),
        (
            "PartitionTimeLimit",
            90,
            "the job asks for 60 min, and its partition allows 30 (PartitionTimeLimit)",
            "reduce cluster.time_limit_min to 30 and submit again",
        ),
    ],
    ids=["shorter", "too-late", "not-reserved", "time-limit"],
)
def test_what_a_pending_job_waits_for_is_in_numbers(
    run: RunDir,
    slurm: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    begins_in_min: int,
    cause: str,
    fix: str,
) -> None:
    change_state(run, status="queued", reason="")
    slurm("PENDING", reason=reason)
    record = {"TimeLimit": "01:00:00", "NumNodes": "2-2", "Partition": "main"}
    begin = time.time() + 60 * begins_in_min
    nodes = frozenset({"n1", "n2", "n3", "n4"})
    maintenance = Reservation(name="maint", begin=begin, end=begin + 3600, nodes=nodes, is_maintenance=True)
    monkeypatch.setattr(client, "job_record", lambda job_id: record)
    monkeypatch.setattr(client, "partitions", lambda: [MAIN])
    monkeypatch.setattr(client, "reservations", lambda: [maintenance])
    found = explained(run)
    assert found["cause"].startswith(cause)
    assert found["fix"].startswith(fix)


def test_failure_before_the_first_attempt_is_in_the_batch_log(run: RunDir, slurm: Callable[..., None]) -> None:
    change_state(run, status="failed", attempt=0, reason="job 7 ended as FAILED with exit code 1 on n1")
    slurm("FAILED", exit_code=1, nodes="n1")
    (run.path / "submitit").mkdir()
    (run.path / "submitit" / "7_0_log.out").write_text("Traceback\nModuleNotFoundError: No module named 'submitit'\n")
    found = explained(run)
    assert found["cause"] == "the ranks' Python does not find submitit"
    assert found["evidence"] == "submitit/7_0_log.out:2: ModuleNotFoundError: No module named 'submitit'"
    (run.path / "submitit" / "7_0_log.out").write_text("Traceback\nSlurmError: scontrol is not installed\n\n")
    found = explained(run)
    assert found["cause"] == "the batch script ended before it started ranks: SlurmError: scontrol is not installed"
    assert found["evidence"] == "submitit/7_0_log.out:2: SlurmError: scontrol is not installed"
    change_state(run, reason="no rank fits: cluster.nodes=1")
    assert explained(run)["cause"] == "no rank fits: cluster.nodes=1", "what the supervisor has recorded"
    change_state(run, reason="")
    (run.path / "submitit" / "7_0_log.out").unlink()
    (run.path / "supervisor.log").write_text("12:00:00 INFO a line\n")
    assert explained(run)["cause"] == "no cause was recorded", "its log is not that of a batch script"


def test_output_that_slurm_cannot_create_is_the_cause(run: RunDir, slurm: Callable[..., None]) -> None:
    change_state(run, status="failed", attempt=0, reason="job 7 ended as FAILED by signal 53")
    slurm("FAILED", signal=53, nodes="n1")
    found = explained(run)
    assert found["cause"] == "Slurm could not create the job's output file, so that the job ended before its first line"
    assert found["fix"].startswith("runs_dir must exist on the node under the same path")


def test_stopped_run_has_the_request_as_cause(run: RunDir) -> None:
    change_state(run, status="stopped", reason="everything saved (`hpcdist stop` by ada)")
    found = explained(run)
    assert found["cause"] == "everything saved (`hpcdist stop` by ada)"
    assert found["fix"] == "`hpcdist resume first` continues from the newest checkpoint"
    run.config.write_text("trainer: {script: [/home/ada/train.py, --lr, '0.1']}\n")
    again = "`hpcdist resume first` starts train.py "
    assert explained(run)["fix"] == f"{again}from the beginning, unless it has saved elsewhere"
    (run.checkpoints / "newest.pt").touch()
    assert explained(run)["fix"] == f"{again}again, with its files in the run's checkpoints/"


MEMORY = {
    "device": "GPU 0",
    "allocated_bytes": 15 << 30,
    "reserved_bytes": 15 << 30,
    "used_bytes": 16 << 30,
    "total_bytes": 16 << 30,
    "has_history": True,
    "holders": [
        {"place": "step (own.py:31)", "num_bytes": 12 << 30, "num_blocks": 3, "largest_bytes": 4 << 30},
        {"place": "", "num_bytes": 3 << 30, "num_blocks": 1, "largest_bytes": 3 << 30},
    ],
}


def test_full_gpu_is_explained_by_lines_of_code(run: RunDir) -> None:
    write_outcome(run, 0, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    outcome = json.loads(run.attempt(1).outcome(0).read_text())

    def memory_lines(record: dict[str, Any]) -> list[str]:
        write_json(run.attempt(1).outcome(0), {**outcome, "device_memory": record})
        lines = explain(run).lines
        assert "cause:    the GPU's memory is full" in lines
        return [line for line in lines if line.startswith("memory:")]

    assert memory_lines(MEMORY) == [
        "memory:   15.0 GiB allocated, 15.0 GiB reserved by torch, 1.0 GiB used outside of it, of 16.0 GiB of GPU 0",
        "memory:   12.0 GiB in 3 blocks of at most 4.0 GiB: step (own.py:31)",
        "memory:   3.0 GiB: no line of Python, as in a backward pass",
    ]
    assert memory_lines({**MEMORY, "holders": 3}) == [], "a damaged record hides the failure of no rank"


def test_failed_preflight_is_the_cause_with_its_fix(run: RunDir) -> None:
    reason = "preflight: n3: disk: no space left on device; remove old runs"
    disk = {"name": "disk", "level": "failure", "node": "n3", "text": "no space left on device", "fix": "remove old"}
    clock = {"name": "clock", "level": "warning", "node": "n2", "text": "2 s ahead", "fix": "start chronyd"}
    write_json(run.attempt(1).preflight, {"checks": [clock, disk]})
    change_state(run, reason=reason)
    assert explained(run)["cause"] == reason, "a preflight that only warns does not end the attempt"
    write_json(run.attempt(1).failure, {"kind": "unfit", "rank": 0, "host": "", "step": None, "error": reason})
    assert explained(run) == {
        "status": f"failed: {reason}",
        "cause": "n3 is unfit for a run: disk: no space left on device",
        "evidence": "attempts/001/preflight.txt, before the ranks started",
        "fix": "remove old",
    }
    write_json(run.attempt(1).preflight, {"checks": [disk | {"node": "", "text": "on all 4 nodes: full"}]})
    assert explained(run)["cause"] == "the nodes are unfit for a run: disk: on all 4 nodes: full"


def pattern_name(text: str) -> str:
    """Return the name of the first pattern that matches a text."""
    found = first_match(text.splitlines())
    assert found is not None, text
    return found[0].name


def test_recorded_and_quoted_texts_match_their_pattern() -> None:
    for name, line in (
        ("time-limit", "slurmstepd-n1: error: *** STEP 27.0 ON n1 CANCELLED AT 2026-11-20T08:21:04 DUE TO TIME LIMIT"),
        ("preempted", "slurmstepd-n2: error: *** JOB 28 ON n2 CANCELLED AT 2026-11-20T08:20:35 DUE TO PREEMPTION ***"),
        ("node-failure", "rank 2 on n2 was killed by SIGKILL, last heartbeat at step 46; lost n2"),
        ("crashed", "rank 1 on n1 was killed by SIGSEGV, last heartbeat at step 3"),
        ("missing-module", "ModuleNotFoundError: No module named 'nosuch'"),
        (
            "port-of-the-code",
            "DistNetworkError: The server socket has failed to listen. name: EADDRINUSE",
        ),
        ("port-of-the-code", "OSError: [Errno 98] Address already in use"),
        ("port-taken", "rank 0 cannot listen on 127.0.0.1:20480: [Errno 98] Address already in use"),
        ("port-taken", "the program at 10.0.0.1:21000 is not rank 0 of this attempt (hpcdist/7/1): timed out"),
        ("port-taken", "rank 1 could not connect to the other ranks: does another program listen on this port?"),
        ("out-of-memory", "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        ("collective-timeout", "[/gloo/transport/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to"),
        ("no-program", "no rank was started at all: slurmstepd-n1: error: execve(): sh: No such file or directory"),
        ("step-not-started", "srun: error: Unable to create step for job 1: Requested nodes are busy"),
        ("not-started", "rank 7 on n7 was not started within launch.init_timeout_s=120 s: no output of srun"),
        ("not-started", "no rank was started within launch.init_timeout_s=60 s: importing torch (001-parent.log)"),
        (
            "step-not-started",
            "rank 3 on n2 was killed by SIGKILL, last heartbeat at step 50; step 2.1 (attempt-001) does not end",
        ),
        ("unreachable", "DistNetworkError: The client socket has timed out after 2000ms while trying to connect to"),
        # https://www.osc.edu/documentation/knowledge_base/out_of_memory_oom_or_excessive_memory_usage
        ("out-of-memory", "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=14604003.0 cgroup. Some"),
        ("out-of-memory", "slurmstepd: error: StepId=41.0 exceeded memory limit (2048 > 1024), being killed"),
        ("out-of-memory", "slurmstepd: error: Exceeded job memory limit"),
        ("out-of-memory", "RuntimeError: DataLoader worker (pid 31) is killed by signal: Killed."),
        ("out-of-memory", "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.28 TiB for an array"),
        ("cuda-out-of-memory", "Cuda failure 2 'out of memory'"),
        ("cuda-out-of-memory", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(h)`"),
        # https://github.com/XPixelGroup/BasicSR/issues/737
        ("collective-timeout", "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, OpType="),
        ("duplicate-gpu", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60"),
        ("gpu-lost", "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
        # https://github.com/lllyasviel/Fooocus/issues/1313
        ("driver-too-old", "The NVIDIA driver on your system is too old (found version 11040). Please update"),
    ):
        assert pattern_name(line) == name, line


def test_causes_precede_their_consequences(run: RunDir) -> None:
    lines = ["Connection closed by peer", "Detected 1 oom_kill event in StepId=1.0", "CUDA out of memory"]
    assert pattern_name("\n".join(lines)) == "cuda-out-of-memory"
    assert first_match(lines[:2]) == (next(p for p in PATTERNS if p.name == "out-of-memory"), 1)
    assert first_match(["a line", "another"]) is None
    for line, cause in (
        ("srun: error: Node failure on n4", "a node failed: n4"),
        ("STEP 1.0 CANCELLED DUE TO NODE FAILURE", "a node failed"),
    ):
        finding = explain_attempt(run, run.attempt(1), line)
        assert finding is not None
        assert finding.cause.startswith(cause)


@pytest.mark.parametrize(
    "outcome", [{}, {"outcome": 1, "time": "x"}, {"outcome": "failed"}, {"outcome": "failed", "time": "x"}]
)
def test_damaged_records_of_an_attempt_are_passed_over(run: RunDir, outcome: dict[str, Any]) -> None:
    attempt = run.attempt(1)
    write_outcome(run, 1, "ValueError: loss is nan", at=2.0)
    write_json(attempt.outcome(0), outcome)
    for checks in (
        7,
        [1],
        [{"level": "failure"}],
        [{"level": "failure", "node": 1, "name": "", "text": "", "fix": ""}],
    ):
        write_json(attempt.preflight, {"checks": checks})
        write_json(attempt.failure, {"kind": "unfit", "rank": 1, "error": "ValueError: loss is nan"})
        found = explain_attempt(run, attempt)
        assert found is not None
        assert "loss is nan" in found.evidence


def test_heartbeat_with_other_values_than_numbers_is_none(run: RunDir) -> None:
    beat = {"time": 1.0, "step": 7, "metrics": {}, "metric_steps": {"loss": 7}}
    write_json(run.attempt(1).beat(0), beat)
    assert run.attempt(1).read_beat(0) is not None
    for steps in (7, {"loss": "x"}):
        write_json(run.attempt(1).beat(0), beat | {"metric_steps": steps})
        assert run.attempt(1).read_beat(0) is None
