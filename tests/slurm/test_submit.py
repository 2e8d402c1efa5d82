"""`hpcdist submit`, `stop` and `cancel` on a real Slurm."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from doc_blocks import ROOT, blocks
from hpcdist_runs import HOLD_OVERRIDES, HOLD_STEP, HPCDIST, LAST_STEP, unused_port, wait_for
from simulated_gpus import libraries
from slurm_cluster import WAIT_S, DevCluster, slurm_release
from slurm_runs import NUM_RANKS, ON_FOUR_RANKS, TWO_COUNTING_RANKS, SlurmRuns

from hpcdist.host.json_files import read_json_lines
from hpcdist.slurm.output import parse_time


def test_stop_and_cancel_end_a_running_job(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    for action, status in (("stop", "stopped"), ("cancel", "cancelled")):
        name = f"to-{action}"
        job = slurm_runs.submit(name, *TWO_COUNTING_RANKS)
        wait_for(slurm_runs.attempt(name).beat(1).exists, "the first steps", timeout_s=WAIT_S)
        code, output = slurm_runs.command(action, name)
        assert code == 0, output
        state = slurm_runs.wait_end(name, job)
        assert (state.status, state.attempt) == (status, 1)
        assert f"`hpcdist {action}` by " in state.reason
        assert devcluster.job(job)["JobState"] == "COMPLETED"
        slurm_runs.assert_no_process_left(name)
        if action == "stop":
            # A stopped run stays stopped if its job is requeued.
            devcluster.run("scontrol", "requeue", job)
            slurm_runs.start_now(job)
            devcluster.wait_until(lambda job=job: devcluster.job(job)["Restarts"] == "1", "the job runs again")  # type: ignore[misc]
            assert slurm_runs.wait_end(name, job) == state
            assert "the run has ended already: stopped: " in slurm_runs.job_log(name)


@pytest.mark.faults
def test_scancelled_run_saves_and_has_status_stopped(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    name = "scancelled"
    job = slurm_runs.submit_held(name)
    devcluster.run("scancel", job)
    slurm_runs.release(name)
    state = slurm_runs.wait_end(name, job)
    assert (state.status, state.reason) == ("stopped", "everything saved (Slurm ends the job)")
    assert slurm_runs.checkpoint_steps(name)[-1] >= HOLD_STEP
    slurm_runs.assert_no_process_left(name)


# --- options of one submission


def test_dependency_and_begin_time_are_passed_to_slurm(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    first = slurm_runs.submit("waits-first", "--begin", "now+1hour")
    arguments = [*slurm_runs.config("second"), "--cluster", "devcluster", "--dependency", f"afterok:{first}"]
    code, output = slurm_runs.command("submit", *arguments, "--begin", "now+2hours", "cluster.gpus_per_node=a100:1")
    assert code == 0, output
    second = slurm_runs.job_id("second")
    before, after = devcluster.job(first), devcluster.job(second)
    assert before["Dependency"] == "(null)"
    assert after["Dependency"] == f"afterok:{first}(unfulfilled)"
    assert re.fullmatch("gres[:/]gpu:a100:1", after["TresPerNode"])
    for job, hours in ((before, 1), (after, 2)):
        begin, submitted = (parse_time(job[key]) for key in ("StartTime", "SubmitTime"))
        assert begin is not None
        assert submitted is not None
        # sbatch computes the begin and the controller records the submission, both in whole seconds.
        assert -5 < begin - submitted - 3600 * hours < 60
    # These options are not part of the run's configuration.
    assert "afterok" not in slurm_runs.run_dir("second").config.read_text()
    code, output = slurm_runs.command("submit", *arguments, "name=third", "--dry-run")
    assert code == 0, output
    assert f"\n#SBATCH --dependency=afterok:{first}\n" in output


def test_submit_succeeds_without_a_reachable_tracking_server(slurm_runs: SlurmRuns) -> None:
    uri = f"http://127.0.0.1:{unused_port()}"
    arguments = [*slurm_runs.config("offline"), f"tracking.uri={uri}", "--begin", "now+1hour"]
    code, output = slurm_runs.command("submit", *arguments, "--cluster", "devcluster")
    assert code == 0, output
    log = slurm_runs.run_dir("offline").path / "sync.log"
    assert output.splitlines()[-1] == f"uploading to MLflow in the background (see {log})"
    wait_for(lambda: f"MLflow at {uri}" in log.read_text(), "the background process to report the failure")
    assert slurm_runs.state("offline").status == "queued"


# --- user errors


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "cluster.account=nobody",
            "cluster.account=nobody: Slurm rejects this job:"
            " Invalid account or account/partition combination specified; your accounts are devcluster, root",
        ),
        ("cluster.constraint=none", "Slurm rejects this job: Invalid feature specification"),
        (
            "cluster.gpus_per_node=h100:1",
            "cluster.gpus_per_node=h100:1: partition main offers at most 0 GPUs of type h100 (its types: a100) per"
            " node: lower it or choose another",
        ),
        (
            "cluster.sbatch.mail-typo=FAIL",
            "Slurm rejects this job: sbatch: unrecognized option '--mail-typo=FAIL'"
            ' Try "sbatch --help" for more information',
        ),
        ("cluster.srun.foo=1", "cluster.srun.foo=1: srun rejects it: unrecognized option '--foo=1'"),
    ],
)
def test_submit_rejects_impossible_requests(slurm_runs: SlurmRuns, override: str, line: str) -> None:
    arguments = [*slurm_runs.config("refused"), "--cluster", "devcluster", override]
    assert slurm_runs.command("submit", *arguments) == (2, f"hpcdist: {line}\n")
    assert not slurm_runs.run_dir("refused").path.exists()


def test_second_request_for_gpus_is_refused(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    keys = ["cluster.gpus_per_node=a100:1", "cluster.sbatch.gres=gpu:1"]
    code, output = slurm_runs.command("submit", *slurm_runs.config("refused"), "--cluster", "devcluster", *keys)
    assert (code, output) == (
        2,
        "hpcdist: cluster.sbatch.gres (gpu:1) requests GPUs beside cluster.gpus_per_node=a100:1, which Slurm refuses:"
        " remove it; cluster.gpus_per_node: a100:4 requests a type\n",
    )
    both = ["sbatch", "--test-only", "--gpus-per-node=a100:1", "--gres=gpu:1", "--wrap=true"]
    done = subprocess.run(both, env=devcluster.env, capture_output=True, text=True, check=False)
    refuses = slurm_release() >= (26, 5)
    assert ("--gpus-per-node and --gres=gpu are mutually exclusive" in done.stderr) == refuses, done.stderr


@pytest.mark.slow
def test_each_rank_uses_the_gpu_that_the_options_give_it(
    slurm_runs: SlurmRuns, devcluster: DevCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Slurm assigns files, the GPUs are simulated. The expected values are those of docs/how-to/gpus.md."""
    monkeypatch.setenv("PYTHONPATH", str(libraries()), prepend=os.pathsep)
    monkeypatch.setenv("SIMGPU_DEVICES", "2")
    node = ["cluster.nodes=1", "cluster.gpus_per_node=a100:2", "stop.max_steps=4", "launch.device=cuda"]
    options = {
        "shared": [],
        # Slurm 22.05 binds nothing by a type alone.
        "own": ["cluster.srun.gpus-per-task=a100:1", "cluster.srun.gpu-bind=per_task:1"],
        "bound": ["cluster.srun.gpu-bind=single:1"],
        "full": ["cluster.tasks_per_node=3", "launch.max_restarts=0"],
    }
    jobs, found = {}, {}
    for name, more in options.items():
        (tmp_path / name).mkdir()
        monkeypatch.setenv("SIMGPU_FOLDER", str(tmp_path / name))
        jobs[name] = slurm_runs.submit(f"gpus-{name}", *node, *more)
    for name, job in jobs.items():
        state, output = slurm_runs.wait_end(f"gpus-{name}", job), slurm_runs.job_log(f"gpus-{name}")
        if name == "full":
            refused = r"sees 2 GPU\(s\) \(.*\) and would use the same one as another of 3 ranks on its node, GPU-"
            assert (state.status, bool(re.search(refused, output))) == ("failed", True), output
            continue
        assert state.status == "finished", output
        logs = "".join(path.read_text() for path in slurm_runs.attempt(f"gpus-{name}").path.glob("rank-*.log"))
        used = re.findall(r"context on (.*)", (tmp_path / name / "log").read_text())
        found[name] = sorted(re.findall(r"device: (\S+) \(Simulated GPU", logs)), sorted(set(used))
    own = ["cuda:0", "cuda:0"], ["device 0, the node's 0", "device 0, the node's 1"]
    shared = ["cuda:0", "cuda:1"], ["device 0, the node's 0", "device 1, the node's 1"]
    assert found == {"shared": shared, "own": own, "bound": own}


def test_test_option_shows_expected_start_and_submits_nothing(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    name = "estimated"
    code, output = slurm_runs.command("submit", *slurm_runs.config(name), "--cluster", "devcluster", "--test")
    assert code == 0, output
    assert "the job would start at 20" in output
    assert not slurm_runs.run_dir(name).path.exists()
    assert devcluster.run("squeue", "--noheader") == ""


@pytest.mark.lost_night
def test_request_that_starts_before_a_maintenance_is_named(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    arguments = [*slurm_runs.config("maintained", *TWO_COUNTING_RANKS, "cluster.time_limit_min=60", "preflight=off")]
    arguments += ["--cluster", "devcluster"]
    make = ["scontrol", "create", "reservation", "ReservationName=maint", "Nodes=ALL", "Users=root", "Flags=MAINT"]
    devcluster.run(*make, "StartTime=now+30minutes", "Duration=60")
    try:
        code, output = slurm_runs.command("submit", *arguments)
        assert code == 0, output
        note = (
            r"note: the job needs 60 min, and maintenance maint begins in \d\d min on all nodes: with"
            r" cluster\.time_limit_min=2\d it would start now, and it continues by itself afterwards"
        )
        assert re.search(note, output), output
        job = slurm_runs.job_id("maintained")
        devcluster.wait_until(
            lambda: devcluster.job(job)["Reason"].startswith("ReqNodeNotAvail"), "Slurm looks at the job"
        )
        code, output = slurm_runs.command("explain", "maintained")
        assert code == 0, output
        found = re.search(rf"`(scontrol update JobId={job} TimeLimit=2\d)` lets it end before that", output)
        assert found is not None, output
        devcluster.run(*shlex.split(found[1]))
        devcluster.wait_job_state(job, "RUNNING")
    finally:
        devcluster.cancel_all()
        devcluster.run("scontrol", "delete", "ReservationName=maint")


# --- `slurm/run.sbatch`: runs in jobs that the user submits with sbatch.


COUNTING = ("trainer=counting:train", "params.until=1000000")
SCRIPT = Path(__file__).resolve().parents[2] / "slurm" / "run.sbatch"


def sbatch(runs: SlurmRuns, name: str, *flags: str, overrides: tuple[str, ...] = ()) -> str:
    """Submit the script with a short run that is held in the second epoch; return the job id."""
    command = ["sbatch", "--parsable", f"--output={runs.folder.parent}/{name}.log", *flags, str(SCRIPT)]
    done = subprocess.run(
        [*command, *runs.config(name, *ON_FOUR_RANKS, *HOLD_OVERRIDES, *overrides)],
        cwd=runs.project,
        env=runs.env(HPCDIST=str(HPCDIST)),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def job_log(runs: SlurmRuns, name: str) -> str:
    return (runs.folder.parent / f"{name}.log").read_text()


@pytest.mark.usefixtures("time_to_save")
def test_requeued_job_resumes_until_it_is_stopped(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    """The ranks only count."""
    name = "by-hand-counting"
    job = sbatch(
        slurm_runs, name, "--ntasks-per-node=1", overrides=("launch.num_ranks=2", *COUNTING, "checkpoint.every_steps=5")
    )
    wait_for(lambda: slurm_runs.checkpoint_steps(name), "a checkpoint", timeout_s=WAIT_S)
    devcluster.run("scontrol", "requeue", job)
    saved = slurm_runs.wait_queued_again(name)
    slurm_runs.start_now(job)
    wait_for(slurm_runs.attempt(name, 2).beat(1).exists, "the ranks to start again", timeout_s=WAIT_S)
    code, output = slurm_runs.command("stop", name)
    assert code == 0, output
    state = slurm_runs.wait_end(name, job)
    assert (state.status, state.attempt, state.restarts) == ("stopped", 2, 0)
    assert slurm_runs.resumed_at(name, 2) == saved
    assert slurm_runs.checkpoint_steps(name)[-1] > saved
    assert devcluster.job(job)["Restarts"] == "1"
    assert "(`hpcdist stop` by " in state.reason


@pytest.mark.faults
def test_run_of_a_job_without_requeue_stops_and_can_be_resumed(
    slurm_runs: SlurmRuns, devcluster: DevCluster, slurm_control: str
) -> None:
    """SIGUSR2 is the signal that Slurm sends ahead of the time limit."""
    name = "by-hand-once"
    job = sbatch(slurm_runs, name, "--no-requeue")
    slurm_runs.wait_until_held(name, NUM_RANKS)
    assert "WARNING Slurm will not requeue this job: " in job_log(slurm_runs, name)
    devcluster.run("scancel", "--signal=USR2", job)
    slurm_runs.release(name)
    state = slurm_runs.wait_end(name, job)
    assert state.status == "stopped"
    assert "; Slurm does not requeue the job (scontrol: Requested operation is presently disabled" in state.reason
    assert devcluster.job(job)["JobState"] == "COMPLETED"
    saved = slurm_runs.checkpoint_steps(name)[-1]
    assert saved >= HOLD_STEP

    code, output = slurm_runs.command("resume", name, "--detach")
    assert code == 0, output
    second = slurm_runs.job_id(name)
    fields = devcluster.job(second)
    assert (fields["NumNodes"].partition("-")[0], fields["TimeLimit"]) == ("2", "00:30:00")
    slurm_runs.assert_finished_as(name, second, slurm_control)
    assert slurm_runs.resumed_at(name, 2) == saved


# --- The console blocks of the documentation that need Slurm, run on the dev cluster.


PAGE = ROOT / "docs" / "tutorials" / "first-slurm-job.md"


@pytest.mark.slow
def test_commands_of_the_slurm_tutorial_succeed(slurm_runs: SlurmRuns, tmp_path: Path) -> None:
    commands = [command for block in blocks(PAGE) if "slurm" in block.words for command in block.commands]
    assert len(commands) >= 3
    env = {
        **slurm_runs.env(),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HPCDIST_RUNS_DIR": str(slurm_runs.folder.parent / "tutorial"),
    }
    for command in commands:
        done = subprocess.run(shlex.split(command), cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


# --- `hpcdist rerun` of a run of Slurm: submitted again, and repeated on this machine.


@pytest.mark.faults
def test_a_submitted_run_is_submitted_again_and_repeated_here(slurm_runs: SlurmRuns) -> None:
    job = slurm_runs.submit("to-repeat")
    assert slurm_runs.wait_end("to-repeat", job).reason == f"trained {LAST_STEP} steps, 2 epochs"

    code, output = slurm_runs.command("rerun", "to-repeat")
    assert code == 0, output
    found = re.search(r"^(\S+) is job (\d+)", output, re.MULTILINE)
    assert found is not None, output
    name, again = found.groups()
    assert output.splitlines()[-1].startswith(f"{name}: no value differs: ")
    state = slurm_runs.wait_end(name, again)
    assert (state.status, state.attempt) == ("finished", 1)
    assert slurm_runs.hosts(name) == slurm_runs.hosts("to-repeat")

    ranks = state.world_size
    code, output = slurm_runs.command("run", "--like", "to-repeat", "name=here", f"launch.num_ranks={ranks}")
    assert code == 0, output
    assert f"{ranks} × cpu" in output
    code, output = slurm_runs.command("compare", "to-repeat", "here")
    assert (code, output.splitlines()[-1].partition(":")[2][:17]) == (0, " no value differs"), output


# --- A user's own script with MLflow's autologging in a Slurm job: every value is in the run of hpcdist once.


@pytest.mark.faults
def test_autologged_metrics_of_a_job_arrive_once(slurm_runs: SlurmRuns) -> None:
    name = "autologged"
    cluster = ["cluster.nodes=2", "cluster.tasks_per_node=1"]
    # `export=True`: with the MLflow of this environment.
    arguments = slurm_runs.config(name, "trainer.script=[autologged.py, --fail]", *cluster, export=True)
    code, output = slurm_runs.command("submit", *arguments, "--cluster", "devcluster")
    assert code == 0, output
    job = slurm_runs.job_id(name)
    state = slurm_runs.wait_end(name, job)
    logs = [slurm_runs.attempt(name, state.attempt).log(rank).read_text() for rank in range(2)]
    assert state.status == "finished", f"{state}\n{logs[0]}"
    assert state.attempt == 2, "the script fails once, after its second epoch"
    for log in logs:
        assert "of 2 ranks" in log, "the ranks are one process group on two nodes"
    code, output = slurm_runs.command("sync", name)
    assert code == 0, output
    counts = Counter((key, step) for key, step, _ in slurm_runs.points(name))
    assert set(counts.values()) == {1}
    steps = {step for key, step in counts if key == "train_loss"}
    journals = [slurm_runs.run_dir(name).journal / f"attempt-00{number}.rank-00000.jsonl" for number in (1, 2)]
    records = [line for one in journals for line in read_json_lines(one) if "train_loss" in line.get("m", {})]
    # MLflow logs by time, and at the end of a training without an error (`BatchMetricsLogger`): it may leave out 1.
    assert steps == {line["s"] for line in records} >= {0, 2, 3}
    assert slurm_runs.param(name, "optimizer_name") == "SGD"
    assert slurm_runs.param(name, "epochs") == "4"
    assert slurm_runs._query("select count(*) from runs where name like 'autologged%'") == [(1,)], "the run of hpcdist"
    assert slurm_runs.mlflow_status(name) == "FINISHED"


# --- Submission from inside another job.

#: Variables with ids, ports, names and places of a job, which differ between any two jobs.
OF_ONE_JOB = re.compile(r"SLURM_(?:.*(?:ID|JOBID|PORT|PID|HOST|NAME|_DIR|NODELIST|ADDR|ADDRESS|_TIME)|TOPOLOGY.*)$")
PRINT_ENVIRONMENT = """
import json, os
print("environment", json.dumps({**os.environ, "affinity": str(os.sched_getaffinity(0))}))
"""


def printed_environment(runs: SlurmRuns, name: str) -> dict[str, str]:
    """Return the affinity and Slurm's variables of rank 0 of a script that has printed its environment."""
    state = runs.wait_end(name, runs.job_id(name))
    assert state.status == "finished", f"{state}\n{runs.job_log(name)}"
    (text,) = re.findall(r"environment (\{.*\})", runs.attempt(name).log(0).read_text())
    variables: dict[str, str] = json.loads(text)
    shown = ("SLURM", "affinity", "RANK", "PMI")
    return {key: value for key, value in variables.items() if key.startswith(shown) and not OF_ONE_JOB.match(key)}


@pytest.mark.slow
@pytest.mark.lost_night
def test_job_submitted_by_an_array_task_equals_one_from_outside(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    (slurm_runs.project / "print_environment.py").write_text(PRINT_ENVIRONMENT)
    job = ["trainer.script=[print_environment.py]", "cluster.nodes=1", "cluster.tasks_per_node=1", "cluster.mem=400M"]
    job += ["cluster.cpus_per_task=2", "preflight=off", "launch.max_restarts=0"]
    arguments = {name: [*slurm_runs.config(name, *job), "--cluster", "devcluster"] for name in ("outside", "inside")}
    code, output = slurm_runs.command("submit", *arguments["outside"])
    assert code == 0, output
    submit = shlex.join([str(HPCDIST), "submit", *arguments["inside"]])
    step = ["srun", "--ntasks=1", "--cpu-bind=map_cpu:0", "--mem-per-cpu=900", "sh", "-c", submit]
    log = slurm_runs.folder.parent / "array-task.log"
    flags = ["--parsable", "--array=3", "--ntasks=1", "--cpus-per-task=1", "--mem-per-cpu=900", f"--output={log}"]
    command = ["sbatch", "--wait", *flags, f"--wrap={shlex.join(step)}"]
    env = slurm_runs.env(RANK="5")
    done = subprocess.run(command, cwd=slurm_runs.project, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + log.read_text()
    outer = done.stdout.strip()
    assert f"submitted from inside job {outer}_3: its variables do not reach the new job" in log.read_text()
    assert slurm_runs.job_id("inside") not in (outer, f"{outer}_3")
    assert devcluster.job(slurm_runs.job_id("inside"))["JobName"].endswith("/inside")
    assert printed_environment(slurm_runs, "inside") == printed_environment(slurm_runs, "outside")


@pytest.mark.lost_night
@pytest.mark.slow
def test_job_submitted_by_an_array_task_has_an_end_of_its_own(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    names = ("child-to-cancel", "child-to-stop")
    lines = []
    for name in names:
        overrides = (*TWO_COUNTING_RANKS, "cluster.nodes=1", "launch.num_ranks=1", "cluster.cpus_per_task=1")
        words = [*slurm_runs.config(name, *overrides), "--cluster", "devcluster"]
        lines.append(shlex.join([str(HPCDIST), "submit", *words]))
    log = slurm_runs.folder.parent / "parent-task.log"
    command = ["sbatch", "--parsable", "--array=3", "--ntasks=1", f"--output={log}"]
    script = "\n".join(["#!/bin/sh", "set -e", *lines, "sleep 3600"])
    env = slurm_runs.env()
    done = subprocess.run(
        command, input=script, cwd=slurm_runs.project, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outer = done.stdout.strip()
    for name in names:
        has_begun = slurm_runs.attempt(name).beat(0).exists
        wait_for(has_begun, f"the first steps of {name}: {log}", timeout_s=WAIT_S)
    cancelled, stopped = (slurm_runs.job_id(name) for name in names)
    assert len({outer, f"{outer}_3", cancelled, stopped}) == 4

    # The end of a child ends neither the task that has submitted it nor the other child.
    code, output = slurm_runs.command("cancel", names[0])
    assert code == 0, output
    assert slurm_runs.wait_end(names[0], cancelled).status == "cancelled"
    slurm_runs.assert_no_process_left(names[0])
    assert devcluster.job(f"{outer}_3")["JobState"] == "RUNNING"
    # The end of the task does not end a child.
    devcluster.run("scancel", outer)
    devcluster.wait_until(lambda: devcluster.job(f"{outer}_3")["JobState"] == "CANCELLED", "the task has ended")
    assert slurm_runs.state(names[1]).status == "running"
    code, output = slurm_runs.command("stop", names[1])
    assert code == 0, output
    assert slurm_runs.wait_end(names[1], stopped).status == "stopped"
    slurm_runs.assert_no_process_left(names[1])


# --- Submission without the environment of the shell.


@pytest.mark.lost_night
@pytest.mark.slow
@pytest.mark.parametrize("how", ["shell", "config", "control"])
def test_ranks_have_path_secrets_and_variables_without_export(slurm_runs: SlurmRuns, how: str) -> None:
    name = f"exported-{how}"
    (slurm_runs.project / "print_environment.py").write_text(PRINT_ENVIRONMENT)
    job = ["trainer.script=[print_environment.py]", "cluster.nodes=1", "cluster.tasks_per_node=1", "preflight=off"]
    job += ["launch.max_restarts=0", "launch.env.OF_LAUNCH=1", "cluster.env.OF_CLUSTER=2"]
    job += ["launch.env.MY_TOKEN=${oc.env:TOKEN_OF_SHELL}"]
    env = {"TOKEN_OF_SHELL": "s3cret", "OF_SHELL": "3"}
    if how == "shell":
        env["SBATCH_EXPORT"] = "NONE"
    elif how == "config":
        job.append("cluster.sbatch.export=NONE")
    code, output = slurm_runs.command("submit", *slurm_runs.config(name, *job), "--cluster", "devcluster", **env)
    assert code == 0, output
    state = slurm_runs.wait_end(name, slurm_runs.job_id(name))
    assert state.status == "finished", f"{state}\n{slurm_runs.job_log(name)}"
    (text,) = re.findall(r"environment (\{.*\})", slurm_runs.attempt(name).log(0).read_text())
    variables: dict[str, str] = json.loads(text)
    assert {"/usr/bin", "/bin"} & set(variables["PATH"].split(":"))
    assert variables.get("OF_SHELL") == ("3" if how == "control" else None)
    assert (variables["OF_LAUNCH"], variables["OF_CLUSTER"], variables["MY_TOKEN"]) == ("1", "2", "s3cret")
    assert not [key for key in variables if key.startswith("SBATCH_EXPORT")]
