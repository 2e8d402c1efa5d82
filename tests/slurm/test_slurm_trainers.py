"""The RPC trainers on Slurm: roles on nodes of their own, a requeue in the middle, and the end of an undisturbed run.

All four go through it at the same time: most of it is waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hpcdist_runs import assert_same, wait_for
from slurm_runs import SlurmRuns

from hpcdist.rundir import RunDir, read_json


@dataclass(frozen=True)
class Case:
    """A shipped config made short, with nodes for its roles."""

    config: str
    trainer: str
    experiment: str
    hold_at: int
    last_step: int
    overrides: tuple[str, ...]
    nodes: tuple[str, ...]
    #: Ranks that step; the others serve them, and are not held.
    num_stepping: int = 1
    shards: tuple[int, ...] = field(default=())


CASES = {
    case.trainer: case
    for case in (
        Case(
            "rl_cartpole",
            "rl",
            "cartpole",
            5,
            80,
            (
                "rl.num_envs=4",
                "rl.rollout_steps=16",
                "rl.eval_episodes=2",
                "rl.record=false",
                "stop.steps=80",
                "stop.threshold=1e9",
            ),
            ("cluster.roles.agent.nodes=1", "cluster.roles.observer.nodes=1"),
        ),
        Case(
            "rnn_lm",
            "rnn",
            "language",
            5,
            80,
            (
                "rnn.corpus_mb=0.1",
                "rnn.vocab_size=300",
                "rnn.embedding=16",
                "rnn.hidden=16",
                "stop.steps=80",
                "rnn.sample_tokens=0",
            ),
            ("cluster.roles.trainer.nodes=1", "cluster.roles.server.nodes=1"),
            shards=(1,),
        ),
        Case(
            "pipeline_resnet50",
            "pipeline",
            "pipeline",
            2,
            16,
            ("model.name=resnet18", "data.batch_size=8", "data.eval_batch_size=360", "stop.steps=16"),
            ("cluster.nodes=2", "cluster.tasks_per_node=1"),
            num_stepping=2,
            shards=(0, 1),
        ),
        Case(
            "hybrid_clicks",
            "hybrid",
            "clicks",
            5,
            80,
            ("hybrid.batch_size=32", "stop.steps=80"),
            ("cluster.roles.trainer.nodes=1", "cluster.roles.server.nodes=1"),
            num_stepping=2,
            shards=(2, 3),
        ),
    )
}


def arguments(runs: SlurmRuns, case: Case, name: str, *more: str) -> list[str]:
    """Of `run` and `submit`, for a run that is held and saved at every step from the first on."""
    (uri,) = [word for word in runs.config(name) if word.startswith("tracking.uri=")]
    common = ["tracking.register_as=null", "tracking.log_every=1", "tracking.system_interval_s=0"]
    path = next(word for word in runs.config(name) if word.startswith("launch.env.PYTHONPATH="))
    gate = ["trainer=gated:train", f"params.gated={case.trainer}", f"params.hold_at={case.hold_at}"]
    return [case.config, f"name={name}", uri, path, "launch.device=cpu", *common, *gate, *case.overrides, *more]


@dataclass(frozen=True)
class Finished:
    """What the fixture has seen of one trainer."""

    run: RunDir
    control: RunDir
    hosts: list[str]
    status: str
    lives: int
    resumed_at: int
    job_state: str
    log: str


@pytest.fixture(scope="module")
def finished(slurm_runs: SlurmRuns) -> Iterator[dict[str, Finished]]:
    """Every trainer's run, requeued while its ranks were held, and one on this machine that nothing happened to."""
    runs, cluster, jobs = slurm_runs, slurm_runs.cluster, {}
    for case in CASES.values():
        words = arguments(runs, case, f"{case.trainer}-requeued", *case.nodes, "cluster.het=off")
        code, output = runs.command("submit", *words, "--cluster", "devcluster")
        assert code == 0, output
        jobs[case.trainer] = str((read_json(run_of(runs, case, "requeued").path / "slurm.json") or {})["job_id"])
    for case in CASES.values():
        held = [run_of(runs, case, "requeued").attempt(1).path / f"held-{rank}" for rank in range(case.num_stepping)]
        wait_for(lambda held=held: all(path.exists() for path in held), f"{case.trainer} to be held", timeout_s=150)
        cluster.run("scontrol", "requeue", jobs[case.trainer])
    for job in jobs.values():
        runs.start_now(job)
    for case in CASES.values():
        words = arguments(runs, case, f"{case.trainer}-control", "params.hold_at=-1")
        code, output = runs.command("run", *words)
        assert code == 0, output
    yield {case.trainer: look(runs, case, jobs[case.trainer]) for case in CASES.values()}
    cluster.cancel_all()


def run_of(runs: SlurmRuns, case: Case, kind: str) -> RunDir:
    return RunDir(runs.folder / case.experiment / f"{case.trainer}-{kind}")


def look(runs: SlurmRuns, case: Case, job: str) -> Finished:
    run, cluster = run_of(runs, case, "requeued"), runs.cluster
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    cluster.until(lambda: cluster.job(job)["JobState"] in ended, f"job {job} is over", within_s=150)
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
        lives=int(cluster.job(job)["Restarts"]) + 1,
        resumed_at=resumed[0] if resumed else -1,
        job_state=cluster.job(job)["JobState"],
        log="".join(logs) + second,
    )


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: str(case.trainer))
def test_roles_on_different_nodes_go_on_after_a_requeue(finished: dict[str, Finished], case: Case) -> None:
    found = finished[case.trainer]
    assert (found.status, found.job_state) == ("finished", "COMPLETED"), found.log
    assert found.lives == 2, found.log
    # The ranks agree on a stop some steps after they have heard of it.
    assert case.hold_at <= found.resumed_at < case.last_step, found.log
    # The first role on one node, the other on another.
    first, last = found.hosts[0], found.hosts[-1]
    assert first != last
    assert set(found.hosts) == {first, last}
    folders = [run.checkpoints / f"step-{case.last_step:08d}" for run in (found.run, found.control)]
    files = sorted(path.name for path in folders[0].glob("*.pt"))
    assert files == sorted(["model.pt", "trainer.pt", *(f"shard-{rank:05d}.pt" for rank in case.shards)])
    assert files == sorted(path.name for path in folders[1].glob("*.pt"))
    for name in files:
        mine, undisturbed = (torch.load(folder / name, weights_only=True) for folder in folders)
        assert_same(mine, undisturbed, name)
