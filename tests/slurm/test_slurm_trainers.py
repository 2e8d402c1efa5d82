"""The trainers with roles or stages on two nodes of a real Slurm: requeue, exact resume, and listening sockets.

The trainers run at the same time, since the tests mostly wait. `make test` runs `ALWAYS`, `make slow` adds those of
`SLOW`, `make faults` has the others.
"""

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from hpcdist_runs import assert_states_equal, listening, mlflow_runs, repair_trainer, wait_for
from slurm_cluster import WAIT_S, DevCluster, shared_folder
from slurm_runs import JOB_ENDED, SlurmRuns

from hpcdist.devcluster import settings
from hpcdist.host.json_files import read_json
from hpcdist.rank.processes import shown_place
from hpcdist.run.folder import RunDir

#: Its ranks listen for RPC connections.
ALWAYS = "rnn"
#: On one machine, tests/multiproc stops `pipeline` and `hybrid`, and kills a rank of `rl`.
SLOW = ("pipeline",)


@dataclass(frozen=True)
class Case:
    """A shipped config, shortened, with nodes for its roles."""

    config: str
    trainer: str
    experiment: str
    hold_at: int
    last_step: int
    overrides: tuple[str, ...]
    nodes: tuple[str, ...]
    #: Ranks that run a training loop and can be held; the other ranks serve them.
    num_stepping: int = 1
    shards: tuple[int, ...] = field(default=())


def all_exist(paths: Sequence[Path]) -> bool:
    return all(path.exists() for path in paths)


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CASES = {
    case.trainer: case
    for case in (
        Case(
            *("rl_cartpole", "rl", "cartpole", 5, 80),
            words("rl.num_envs=4 rl.num_rollout_steps=16 rl.num_eval_episodes=2 stop.max_steps=80 stop.threshold=1e9"),
            words("cluster.roles.agent.nodes=1 cluster.roles.observer.nodes=1"),
        ),
        Case(
            *("rnn_lm", "rnn", "language", 5, 80),
            words(
                "rnn.max_corpus_mb=0.1 rnn.vocab_size=300 rnn.embedding_size=16 rnn.hidden_size=16 stop.max_steps=80"
            ),
            words("cluster.roles.trainer.nodes=1 cluster.roles.parameter_server.nodes=1"),
            shards=(1,),
        ),
        Case(
            *("pipeline_resnet50", "pipeline", "pipeline", 2, 16),
            # Measured split points of two runs differ on a busy machine.
            words("model.name=resnet18 data.batch_size=8 stop.max_steps=16 pipeline.split_points=[layer2]"),
            words("cluster.nodes=2 cluster.tasks_per_node=1"),
            num_stepping=2,
            shards=(0, 1),
        ),
        Case(
            *("hybrid_clicks", "hybrid", "clicks", 5, 80),
            words("hybrid.batch_size=32 stop.max_steps=80"),
            words("cluster.roles.trainer.nodes=1 cluster.roles.parameter_server.nodes=1"),
            num_stepping=2,
            shards=(2, 3),
        ),
    )
}


def arguments(runs: SlurmRuns, case: Case, name: str, *more: str) -> list[str]:
    """Return arguments of `run` and `submit` for a run that is held at a step."""
    (uri,) = [word for word in runs.config(name) if word.startswith("tracking.uri=")]
    common = ["tracking.register_as=null", "tracking.log_every_steps=1", "tracking.system_interval_s=0"]
    path = next(word for word in runs.config(name) if word.startswith("launch.env.PYTHONPATH="))
    gate = ["trainer=gated:train", f"params.gated={case.trainer}", f"params.hold_at={case.hold_at}"]
    return [case.config, f"name={name}", uri, path, "launch.device=cpu", *common, *gate, *case.overrides, *more]


@dataclass(frozen=True)
class Finished:
    """The requeued run of a trainer after its end, and its control run."""

    run: RunDir
    control: RunDir
    hosts: list[str]
    status: str
    sockets: dict[int, set[tuple[str, int]]]
    """Host and port of the listening sockets of each rank while it was held."""
    num_starts: int
    resumed_at: int
    job_state: str
    log: str


def sockets_of(run: RunDir) -> dict[int, set[tuple[str, int]]]:
    """Return host and port of each rank's listening sockets."""
    found = {}
    for process in psutil.process_iter(["cmdline", "name"]):
        place = shown_place(process.info["name"])
        if place is not None and str(run.path) in (process.info["cmdline"] or []):
            rank, _ = place
            found[rank] = listening(process.pid)
    return found


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> list[Case]:
    """The trainers that this session tests."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    tested = [item.callspec.params.get("case") for item in here]
    return [case for case in CASES.values() if case in tested or case.trainer == ALWAYS]


@pytest.fixture(scope="module")
def finished(slurm_runs: SlurmRuns, cases: list[Case]) -> dict[str, Finished]:
    """Every trainer's run, requeued while its ranks were held, and its control run on this machine without Slurm."""
    runs, cluster, jobs, sockets = slurm_runs, slurm_runs.cluster, {}, {}
    with cluster.time_to_save():
        for case in cases:
            words = arguments(runs, case, f"{case.trainer}-requeued", *case.nodes)
            code, output = runs.command("submit", *words, "--cluster", "devcluster")
            assert code == 0, output
            jobs[case.trainer] = str((read_json(run_of(runs, case, "requeued").path / "slurm.json") or {})["job_id"])
        # While the ranks start, not after the jobs: Slurm forgets a job 300 s after its end.
        for case in cases:
            words = arguments(runs, case, f"{case.trainer}-control", "params.hold_at=-1")
            code, output = runs.command("run", *words, **runs.unshipped)
            assert code == 0, output
        for case in cases:
            run = run_of(runs, case, "requeued")
            held = [run.attempt(1).path / f"held-{rank}" for rank in range(case.num_stepping)]
            wait_for(partial(all_exist, held), f"{case.trainer} to be held", timeout_s=WAIT_S)
            sockets[case.trainer] = sockets_of(run)
            cluster.run("scontrol", "requeue", jobs[case.trainer])
            # Not after the wait for the next trainer: after 120 s, Slurm starts the job itself.
            runs.start_now(jobs[case.trainer])
        return {case.trainer: wait_finished(runs, case, jobs[case.trainer], sockets[case.trainer]) for case in cases}


def run_of(runs: SlurmRuns, case: Case, kind: str) -> RunDir:
    return RunDir(runs.folder / case.experiment / f"{case.trainer}-{kind}")


def wait_finished(runs: SlurmRuns, case: Case, job: str, sockets: dict[int, set[tuple[str, int]]]) -> Finished:
    run, cluster = run_of(runs, case, "requeued"), runs.cluster
    cluster.wait_job_state(job, *JOB_ENDED)
    state = run.read_state()
    logs = [path.read_text() for path in sorted((run.path / "submitit").glob("*.out"))]
    second = run.attempt(2).log(0).read_text() if state.attempt > 1 else ""
    resumed = [
        int(line.split("resumed at step ")[1].split()[0]) for line in second.splitlines() if "resumed at" in line
    ]
    beats = [read_json(run.attempt(state.attempt).beat(rank)) or {} for rank in range(state.world_size)]
    return Finished(
        run=run,
        control=run_of(runs, case, "control"),
        hosts=[str(beat.get("host")) for beat in beats],
        status=state.status,
        sockets=sockets,
        num_starts=int(cluster.job(job)["Restarts"]) + 1,
        resumed_at=resumed[0] if resumed else -1,
        job_state=cluster.job(job)["JobState"],
        log="".join(logs) + second,
    )


def marks(case: Case) -> list[pytest.MarkDecorator]:
    if case.trainer in SLOW:
        return [pytest.mark.slow]
    return [] if case.trainer == ALWAYS else [pytest.mark.faults]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=marks(case)) for case in CASES.values()], ids=lambda case: str(case.trainer)
)
def test_requeued_run_on_two_nodes_equals_the_control_run(finished: dict[str, Finished], case: Case) -> None:
    found = finished[case.trainer]
    assert (found.status, found.job_state) == ("finished", "COMPLETED"), found.log
    assert found.num_starts == 2, found.log
    # The ranks agree on a common step at which they stop.
    assert case.hold_at <= found.resumed_at < case.last_step, found.log
    # One node per role or stage.
    first, last = found.hosts[0], found.hosts[-1]
    assert first != last
    assert set(found.hosts) == {first, last}
    folders = [run.checkpoints / f"step-{case.last_step:08d}" for run in (found.run, found.control)]
    files = sorted(path.name for path in folders[0].glob("*.pt"))
    assert files == sorted(["model.pt", "trainer.pt", *(f"shard-{rank:05d}.pt" for rank in case.shards)])
    assert files == sorted(path.name for path in folders[1].glob("*.pt"))
    for name in files:
        mine, undisturbed = (torch.load(folder / name, weights_only=True) for folder in folders)
        assert_states_equal(mine, undisturbed, name)


def test_ranks_listen_only_on_loopback_and_cluster_network(finished: dict[str, Finished]) -> None:
    network = {str(address) for address in ipaddress.IPv4Network(settings.NETWORK).hosts()}
    for trainer, found in finished.items():
        assert set(found.sockets) == set(range(len(found.hosts)))
        for rank, sockets in found.sockets.items():
            assert {host for host, _ in sockets} <= network, (trainer, rank)
            assert len([port for _, port in sockets if 20480 <= port < 32768]) == (rank == 0), "the store"


# --- Sweeps on a real Slurm: one job array, each task of which is a run.


SMALL = ["launch.max_restarts=0", "cluster.nodes=1", "cluster.tasks_per_node=1"]


@pytest.fixture
def sweeps(slurm_runs: SlurmRuns, devcluster: DevCluster) -> Iterator[SlurmRuns]:
    """A separate folder, since the tests change the user's code."""
    with shared_folder() as root:
        yield SlurmRuns(root, slurm_runs.database, devcluster)


def sweep_arguments(runs: SlurmRuns, *overrides: str) -> list[str]:
    return ["submit", *runs.config("tune", *SMALL, *overrides), "--cluster", "devcluster", "--sweep", "seed=1,2,3"]


def test_resubmitted_sweep_runs_only_the_failed_cell(sweeps: SlurmRuns, devcluster: DevCluster) -> None:
    submit = sweep_arguments(sweeps, "trainer=picky:train", "params.until=5")
    code, output = sweeps.command(*submit, "--array-parallelism", "2", "cluster.sbatch.begin=now+1hour")
    assert code == 0, output
    cells = [f"tune-seed_{seed}" for seed in (1, 2, 3)]
    array = sweeps.job_id(cells[0]).partition("_")[0]
    assert [sweeps.job_id(name) for name in cells] == [f"{array}_{index}" for index in range(3)]
    assert f"tune is jobs {array}_0 to {array}_2\n" in output
    fields = devcluster.job(array)
    assert (fields["ArrayTaskId"], fields["ArrayTaskThrottle"], fields["JobName"]) == ("0-2%2", "2", "digits/tune")
    scheduled = {"tune": ("SCHEDULED", None), **{f"seed={seed}": ("SCHEDULED", "tune") for seed in (1, 2, 3)}}

    def are_in_mlflow() -> bool:
        return {name: run[:2] for name, run in mlflow_runs(sweeps.database, "tune").items()} == scheduled

    wait_for(are_in_mlflow, "the upload in the background", timeout_s=WAIT_S)

    code, output = sweeps.command(*submit)
    assert code == 0, output
    assert "sweep tune: 3 cells, 0 to run, in " in output
    assert output.count("(queued (pending))") == 3

    devcluster.run("scontrol", "update", f"JobId={array}", "StartTime=now")
    states = [sweeps.wait_end(name, sweeps.job_id(name)).status for name in cells]
    assert states == ["finished", "failed", "finished"]
    assert "attempt 1: starting 1 ranks" in sweeps.job_log(cells[0])
    repair_trainer(sweeps.project)
    code, output = sweeps.command(*submit, "--follow")
    assert code == 0, output
    assert "  0: seed=2 (failed)  tune-seed_2\n" in output
    assert "seed=2: finished counted to 5\n" in output
    assert "sweep tune: 3 finished\n" in output
    assert "_" not in sweeps.job_id(cells[1]), "a single cell is an ordinary job"
    assert [sweeps.state(name).attempt for name in cells] == [1, 2, 1]
    found = mlflow_runs(sweeps.database, "tune")
    assert set(found) == {"tune", "seed=1", "seed=2", "seed=3"}
    assert {run.status for run in found.values()} == {"FINISHED"}


@pytest.mark.faults
def test_requeue_or_cancel_of_the_last_task_spares_the_others(sweeps: SlurmRuns, devcluster: DevCluster) -> None:
    """SLURM_JOB_ID of the last task is the id of the array, which Slurm's commands apply to all tasks."""
    code, output = sweeps.command(*sweep_arguments(sweeps, "trainer=counting:train", "params.until=100000"))
    assert code == 0, output
    first, middle, last = (f"tune-seed_{seed}" for seed in (1, 2, 3))
    for name in (first, middle, last):
        wait_for(sweeps.attempt(name).beat(0).exists, f"a step of {name}")
    job = sweeps.job_id(last)
    assert devcluster.job(job)["JobId"] == job.partition("_")[0]

    for name in (first, last):
        devcluster.run("scontrol", "requeue", sweeps.job_id(name))
        state = sweeps.wait_requeued(name)
        assert state.reason == "everything saved (Slurm ends the job)"
        saved = sweeps.checkpoint_steps(name)[-1]
        sweeps.start_now(sweeps.job_id(name))
        log = sweeps.attempt(name, 2).log(0)
        wait_for(lambda log=log: log.exists() and "resumed at step " in log.read_text(), f"{name} to resume")  # type: ignore[misc]
        assert sweeps.resumed_at(name, 2) == saved
    restarts = [devcluster.job(sweeps.job_id(name))["Restarts"] for name in (first, middle, last)]
    assert restarts == ["1", "0", "1"]

    code, output = sweeps.command("cancel", last)
    assert code == 0, output
    assert sweeps.wait_end(last, job).status == "cancelled"
    for name, attempt in ((first, 2), (middle, 1)):
        step = sweeps.step(name, attempt)
        wait_for(lambda name=name, attempt=attempt, step=step: sweeps.step(name, attempt) > step, "another step")  # type: ignore[misc]
        assert (sweeps.state(name).status, sweeps.state(name).attempt) == ("running", attempt)
    code, output = sweeps.command(
        *sweep_arguments(sweeps, "trainer=counting:train", "params.until=100000"), "--dry-run"
    )
    assert "  0: seed=3 (cancelled)  tune-seed_3\n" in output
    assert output.count(" (running)\n") == 2
