"""Creation of local runs, their plans, their supervision, and restarts on other nodes."""

import getpass
import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nvml import gpu, install_fake_nvml
from supervisor_scene import DONE, FAKE_RANK, STOP_ON_REQUEST, Recorder, Scene, ScriptedJob, fails

from hpcdist.config.cluster_schema import ClusterConfig, ContainerConfig, RoleRequest
from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.record_schema import TrackingConfig
from hpcdist.config.schema import Config
from hpcdist.config.topology import Topology, port_for
from hpcdist.config.training_schema import DataConfig, ElasticConfig, TrainerConfig
from hpcdist.errors import NO_PROCESS, ConfigError, PreflightError, RunFolderError
from hpcdist.host import gpu_info
from hpcdist.host.gpu_info import gpu_device_files
from hpcdist.host.json_files import read_json
from hpcdist.run import create, folder, snapshot
from hpcdist.run.attempt_times import read_times
from hpcdist.run.create import check_trainer, create_run
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.run.kept_secrets import kept
from hpcdist.run.lease import hold
from hpcdist.run.script_ranks import Spawn
from hpcdist.run.status import end
from hpcdist.supervisor import local_launcher
from hpcdist.supervisor import plan as plans
from hpcdist.supervisor.local_launcher import LocalRanks, supervise_locally
from hpcdist.supervisor.plan import LOOPBACK, Machine, Plan, free_port, make_plan
from hpcdist.supervisor.protocols import NodeChanges

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

PLAN = Plan(num_ranks=1, device="cpu", backend="gloo", threads=1, env={})


@pytest.fixture
def project(tmp_path: Path) -> Path:
    path = tmp_path / "project"
    path.mkdir()
    (path / "train.py").write_text("def train(ctx, cfg): ...\n")
    return path


@pytest.fixture
def make(runs_dir: Path, tmp_path: Path) -> Callable[..., Config]:
    path = tmp_path / "run.yaml"
    path.write_text(f"{{experiment: exp, name: first, runs_dir: {runs_dir}}}\n")
    loaded = load_config(path)

    def make(**changes: Any) -> Config:
        return replace(loaded, **changes)

    return make


# --- trainers


@pytest.mark.parametrize("target", ["ddp", "train:train", "hpcdist.trainers.ddp.train:train", "json:loads"])
def test_existing_trainer_is_not_imported(project: Path, target: str) -> None:
    (project / "train.py").write_text("def train(ctx): ...\nraise RuntimeError\n")
    check_trainer(Config(trainer=TrainerConfig(target=target)), project)
    assert "train" not in sys.modules


def test_syntax_error_is_reported_before_the_start(project: Path) -> None:
    (project / "package").mkdir()
    (project / "package" / "__init__.py").write_text(r"ODD = '\d'")  # a warning of the compiler is no error
    file = project / "package" / "module.py"
    file.write_bytes(b"x = '\0'\n")
    for key, trainer in (
        ("script", TrainerConfig(script=[str(file)])),
        ("target", TrainerConfig(target="package.module:train")),
    ):
        with pytest.raises(ConfigError, match=rf"^trainer\.{key}: {file}: .* cannot contain null bytes"):
            check_trainer(Config(trainer=trainer), project)
        check_trainer(Config(trainer=trainer), project, own_python=True)  # it may know another syntax
        check_trainer(Config(trainer=trainer, container=ContainerConfig(runtime="pyxis", image="i")), project)


# --- creating a run


def test_create_run_writes_config_code_environment_and_secrets(
    project: Path, make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(
        trainer=TrainerConfig(target="train:train"),
        launch=LaunchConfig(env={"API_KEY": "env-s3cret"}),
        tracking=TrackingConfig(uri="http://ada:uri-s3cret@mlflow"),
    )
    monkeypatch.setattr(sys, "argv", ["hpcdist", "run", "launch.env.API_KEY=env-s3cret", "optim.lr=0.1"])
    monkeypatch.setattr(snapshot, "_PACKAGES", ("omegaconf", "no-such-package"))
    run = create_run(config, project)
    assert run.read_state().status == "created"
    secrets = {"API_KEY": "env-s3cret", "HPCDIST_TRACKING_URI": "http://ada:uri-s3cret@mlflow"}
    assert load_run_config(run.config, [], secrets) == config
    assert (run.code / "train.py").is_file()
    facts = read_json(run.environment) or {}
    assert (facts["launcher"], facts["user"], facts["host"]) == ("local", getpass.getuser(), socket.gethostname())
    assert facts["command"] == "hpcdist run launch.env.API_KEY=*** optim.lr=0.1"
    assert set(facts["versions"]) == {"hpcdist", "torch", "omegaconf"}
    assert facts["versions"]["torch"] == torch.__version__, "with its build, unlike the package's metadata"
    assert kept(run) == secrets
    for path in run.path.rglob("*"):
        assert path == run.secrets or not path.is_file() or b"s3cret" not in path.read_bytes(), path


# --- supervising


def test_ranks_get_folder_code_and_secrets_of_their_run(
    project: Path, make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(trainer=TrainerConfig(target="train:train"), params={"hf_token": "s3cret"})
    run = create_run(config, project)
    (run.path / "script.json").write_text(json.dumps({"1.0": [["environment", None], *DONE]}))
    monkeypatch.setattr(
        local_launcher, "rank_command", lambda folder: [sys.executable, "-S", str(FAKE_RANK), str(folder)]
    )
    project.rename(project.with_name("moved"))
    config = replace(config, launch=LaunchConfig(fork=False))
    report = Recorder()
    plan = replace(PLAN, env={"SHARED": "launch.env", "PYTHONPATH": "/launch-env"})
    own = {"HOME": "/home/ada", "SHARED": "caller", "PYTHONPATH": "/caller"}
    state = supervise_locally(run, config, plan, lambda: nullcontext(report), own, tracking_uri="")
    assert state.status == "finished"
    assert not run.lease.exists()
    env = dict(line.split("=", 1) for line in run.attempt(1).log(0).read_text().splitlines())
    assert env["PWD"] == str(run.path), "the project is gone"
    assert (env["PYTHONPATH"], env["HOME"], env["SHARED"]) == (f"{run.code}:/launch-env", "/home/ada", "launch.env")
    assert (env["HPCDIST_JOB_ID"], env["HPCDIST_ATTEMPT"], env["HPCDIST_WORLD_SIZE"]) == ("exp/first", "1", "1")
    assert (env["HPCDIST_PARAMS_HF_TOKEN"], env["HPCDIST_FOLDER_IDENTITY"]) == ("s3cret", folder.identity(run.path))


def test_supervise_rejects_an_incomplete_run(project: Path, make: Callable[..., Config]) -> None:
    run = create_run(make(), project)
    run.environment.unlink()
    with pytest.raises(RunFolderError, match=r"^run first is incomplete \(no environment\.json\): remove"):
        supervise_locally(run, make(), PLAN, lambda: nullcontext(Recorder()), {}, tracking_uri="sqlite:///x")
    assert not run.lease.exists()


def test_run_that_cannot_start_a_process_fails_with_that_cause(
    project: Path, make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a small `ulimit -u`, which does not bind root."""

    def no_more_processes() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    run = create_run(make(), project)
    monkeypatch.setattr(local_launcher, "Guard", no_more_processes)
    state = supervise_locally(run, make(), PLAN, lambda: nullcontext(Recorder()), {}, tracking_uri="")
    assert (state.status, state.reason) == ("failed", f"Resource temporarily unavailable: {NO_PROCESS}")
    assert run.read_state() == state
    assert not run.lease.exists()


def test_missing_click_log_is_reported_before_the_start(tmp_path: Path) -> None:
    missing = tmp_path / "clicks.parquet"
    config = load_config("hybrid_clicks", [f"hybrid.file={missing}"])
    with pytest.raises(ConfigError, match=rf"hybrid\.file: no such file: {missing}"):
        create.check_trainer(config, tmp_path)
    missing.touch()
    create.check_trainer(config, tmp_path)


# --- Restarts on other nodes: failures that lost nodes explain, nodes that do not answer, and nodes that return.


EXIT_0: list[list[Any]] = []


@pytest.fixture
def scene(runs_dir: Path) -> Scene:
    return Scene(RunDir.create(runs_dir / "exp" / "first"))


class Nodes(NodeChanges):
    """Node changes that a test prescribes for the first attempts; later ones have none."""

    def __init__(self, *, changes: tuple[str, ...] = (), lost: tuple[int, str] | None = None, growth: str = "") -> None:
        self.changes = list(changes)
        self.silent = lost
        self.more = growth

    def detect_lost(self) -> tuple[int, str] | None:
        return self.silent

    def replace_lost(self) -> str:
        self.silent = None
        return self.changes.pop(0) if self.changes else ""

    def detect_returned(self) -> str:
        return self.more

    def use_returned(self) -> None:
        self.more = ""


def test_node_failures_do_not_count_against_max_restarts(scene: Scene) -> None:
    scene.launch = {"max_restarts": 0}
    scene.script(first=[fails("peer lost"), EXIT_0], second=[fails("peer lost"), EXIT_0], third=[[*DONE], EXIT_0])
    nodes = Nodes(changes=("no answer from n3: continuing on 3 of 4 nodes", "n4 takes over"))
    supervisor = scene.supervisor(ScriptedJob(nodes=nodes))
    state = scene.supervise(supervisor)
    assert (state.status, state.attempt, state.restarts) == ("finished", 3, 2)
    assert "restart: no answer from n3: continuing on 3 of 4 nodes" in scene.report.notes
    assert scene.run.attempt(1).failure.exists(), "it counts in the search for a failing node"


def test_node_without_an_answer_ends_the_attempt(scene: Scene) -> None:
    scene.script(first=[STOP_ON_REQUEST, STOP_ON_REQUEST], second=[[*DONE], EXIT_0])
    nodes = Nodes(changes=("no answer from n2: continuing on 1 of 2 nodes",))
    supervisor = scene.supervisor(ScriptedJob(nodes=nodes))
    scene.report.on_attempt = lambda attempt: setattr(nodes, "silent", (1, "n2") if attempt.number == 1 else None)
    state = scene.supervise(supervisor)
    assert (state.status, state.attempt, state.restarts) == ("finished", 2, 1)
    ((failure, _),) = scene.report.failures
    assert (failure.kind, failure.rank, failure.host) == ("lost", 1, "n2")
    assert failure.sentence().startswith("rank 1 on n2 was lost: its node does not answer")


def test_ranks_are_restarted_on_more_nodes_and_the_run_goes_on(scene: Scene) -> None:
    scene.script(first=[STOP_ON_REQUEST, STOP_ON_REQUEST], second=[[*DONE], EXIT_0])
    nodes = Nodes(growth="n3")
    supervisor = scene.supervisor(ScriptedJob(nodes=nodes))
    scene.report.on_attempt = lambda attempt: setattr(nodes, "more", "n3" if attempt.number == 1 else "")
    state = scene.supervise(supervisor)
    assert (state.status, state.attempt, state.restarts) == ("finished", 2, 1)
    request = scene.run.attempt(1).read_request()
    assert request is not None
    assert (request.cause, request.sentence) == ("growth", "to restart on more nodes: n3 answers again")
    assert scene.run.attempt(2).read_request() is None


def test_nodes_excluded_by_the_preflight_are_not_recorded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.script(first=[[*DONE]])
    supervisor = scene.supervisor(ScriptedJob(nodes=Nodes()))
    launcher, found = scene.launcher, []
    start = launcher.start

    def start_on_fewer_nodes(attempt: Attempt) -> LocalRanks:
        times = read_times(attempt)
        assert times is not None
        found.append((scene.run.read_state().world_size, times.num_ranks))
        launcher.num_ranks = 1
        return start(attempt)

    monkeypatch.setattr(launcher, "start", start_on_fewer_nodes)
    state = scene.supervise(supervisor)
    times = read_times(scene.run.attempt(1))
    assert times is not None
    assert found == [(2, 2)]
    assert (state.status, state.world_size, times.num_ranks, times.status) == ("finished", 1, 1, "finished")


@pytest.mark.parametrize(("requeued", "status"), [(False, "stopped"), (True, "queued")])
def test_end_of_the_job_during_the_preflight_is_no_fault(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, requeued: bool, status: str
) -> None:
    def start(attempt: Attempt) -> LocalRanks:
        raise PreflightError("preflight: group: on all 4 nodes: it has not joined the group of all nodes within 120 s")

    supervisor = scene.supervisor(ScriptedJob(ending=True, requeued=requeued))
    monkeypatch.setattr(scene.launcher, "start", start)
    state = scene.supervise(supervisor)
    assert (state.status, state.reason) == (status, "everything saved (Slurm ends the job)")
    assert not scene.report.failures


def test_job_end_during_a_restart_on_more_nodes_ends_the_run(scene: Scene) -> None:
    scene.script(first=[STOP_ON_REQUEST, STOP_ON_REQUEST])
    nodes = Nodes(growth="n3")
    supervisor = scene.supervisor(ScriptedJob(nodes=nodes, ending=True))
    state = scene.supervise(supervisor)
    assert (state.status, state.attempt) == ("stopped", 1)
    request = scene.run.attempt(1).read_request()
    assert request is not None
    assert request.cause == "preemption"


def test_name_of_a_user_is_never_the_cause_of_a_request(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "{by}growth"
    monkeypatch.setenv("LOGNAME", name)
    scene.script(first=[STOP_ON_REQUEST, [["await", "{attempt}/request.json"]]], second=[[*DONE], EXIT_0])
    scene.report.on_attempt = lambda attempt: attempt.number == 1 and end(scene.run, "stop")
    with hold(scene.run):
        state = scene.supervise()
    assert (state.status, state.attempt) == ("stopped", 1)
    assert state.reason == f"everything saved (`hpcdist stop` by {name})"
    request = scene.run.attempt(1).read_request()
    assert request is not None
    assert (request.cause, request.by) == ("user", f"`hpcdist stop` by {name}")


# --- Plans of local runs for combinations of configs and machines.


CPU = {
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
}
GPU = {name: value for name, value in CPU.items() if not name.startswith("MALLOC")}


def planned(num_cpus: int, num_gpus: int, **launch: Any) -> Plan:
    return make_plan(Config(launch=LaunchConfig(**launch)), Machine(num_cpus=num_cpus, num_gpus=num_gpus))


@pytest.mark.parametrize(
    ("num_cpus", "num_gpus", "launch", "expected"),
    [
        (8, 0, {}, (2, "cpu", "gloo", 4)),
        (8, 4, {}, (4, "cuda", "nccl", 2)),
        (8, 4, {"num_ranks": 3}, (3, "cuda", "nccl", 2)),
        (8, 4, {"device": "cpu", "num_ranks": 8}, (8, "cpu", "gloo", 1)),
        (8, 0, {"device": "xpu", "num_ranks": 4}, (4, "xpu", "xccl", 2)),
        (2, 0, {"num_ranks": 5}, (5, "cpu", "gloo", 1)),
        (7, 0, {"num_ranks": 3, "num_threads": 5}, (3, "cpu", "gloo", 5)),
    ],
)
def test_plan_of_ranks_device_backend_and_threads(
    num_cpus: int, num_gpus: int, launch: dict[str, Any], expected: tuple[int, str, str, int]
) -> None:
    plan = planned(num_cpus, num_gpus, **launch)
    num_ranks, device, backend, threads = expected
    env = {"OMP_NUM_THREADS": str(threads)} | (GPU if device != "cpu" else CPU)
    assert plan == Plan(num_ranks=num_ranks, device=device, backend=backend, threads=threads, env=env)


SPAWN = Spawn(script="train.py", call="torch.multiprocessing.spawn", place="train.py:9")
STARTS = "train.py starts its own ranks (torch.multiprocessing.spawn in train.py:9)"
READ = "let the script read RANK, WORLD_SIZE and LOCAL_RANK, as under torchrun, instead of starting processes"


def planned_script(num_gpus: int, spawn: Spawn | None = None, **sections: Any) -> Plan:
    config = Config(trainer=TrainerConfig(script=["train.py"]), **sections)
    return make_plan(config, Machine(num_cpus=8, num_gpus=num_gpus), spawn)


def test_script_has_one_rank_for_each_gpu_or_one_without() -> None:
    assert [planned_script(gpus).num_ranks for gpus in (0, 1, 4)] == [1, 1, 4]
    assert planned_script(0, launch=LaunchConfig(num_ranks=3)).num_ranks == 3


def test_only_jobs_stop_idle_runs_by_default() -> None:
    assert [LaunchConfig().idle_s(in_job=in_job) for in_job in (True, False)] == [3600.0, None]
    assert [LaunchConfig(idle_timeout_s=0).idle_s(in_job=in_job) for in_job in (True, False)] == [None, None]
    assert [LaunchConfig(idle_timeout_s=60).idle_s(in_job=in_job) for in_job in (True, False)] == [60.0, 60.0]


def test_script_that_starts_its_own_ranks_is_started_once() -> None:
    assert [planned_script(gpus, SPAWN).num_ranks for gpus in (0, 1, 4)] == [1, 1, 1]
    assert planned_script(4, SPAWN, launch=LaunchConfig(num_ranks=1)).num_ranks == 1
    with pytest.raises(ConfigError) as caught:
        planned_script(4, SPAWN, launch=LaunchConfig(num_ranks=2))
    assert str(caught.value) == f"launch.num_ranks=2, but {STARTS}: set launch.num_ranks=1, or {READ}"
    with pytest.raises(ConfigError) as caught:
        planned_script(4, SPAWN, roles={"trainer": 1, "server": 1})
    assert str(caught.value) == f"roles need a process for each rank, but {STARTS}: remove roles, or {READ}"


def test_topology_of_a_local_rank_inside_a_slurm_job() -> None:
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "99"}
    plan = planned(8, 0, num_ranks=4, env={"OMP_NUM_THREADS": "9", "HPCDIST_RANK": "77"})
    assert (plan.env, plan.threads) == (CPU | {"OMP_NUM_THREADS": "9", "HPCDIST_RANK": "77"}, 2)
    env = plan.rank_env(3, job_id="exp/first", attempt=2, master_port=20000)
    found = Topology.from_env(slurm | env)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 3, 4)
    assert (found.master_addr, found.master_port) == ("127.0.0.1", 20000)
    assert (found.job_id, found.attempt, found.num_nodes) == ("exp/first", 2, 1)


def test_machine_counts_usable_cores_and_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 5})
    install_fake_nvml(monkeypatch, *[gpu("NVIDIA H200")] * 4)
    for env, num_gpus in (({}, 4), ({"CUDA_VISIBLE_DEVICES": ""}, 0), ({"CUDA_VISIBLE_DEVICES": " 0, 1 "}, 2)):
        assert Machine.inspect(env) == Machine(num_cpus=3, num_gpus=num_gpus)


@pytest.mark.skipif(gpu_device_files() > 0, reason="this machine has GPUs")
def test_variable_selects_no_gpu_that_the_machine_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_fake_nvml(monkeypatch)
    selected = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert Machine.inspect(selected).num_gpus == 0
    monkeypatch.setattr(gpu_info, "AMD_DRIVER", tmp_path)
    assert Machine.inspect(selected).num_gpus == 2, "its GPUs are not counted"


# --- elastic runs


def planned_elastic(num_gpus: int, num_ranks: int, **elastic: Any) -> Plan:
    data = DataConfig(global_batch_size=16)
    config = Config(launch=LaunchConfig(num_ranks=num_ranks), data=data, elastic=ElasticConfig(**elastic))
    return make_plan(config, Machine(num_cpus=8, num_gpus=num_gpus))


def test_elastic_run_uses_fewer_gpus_than_ranks() -> None:
    assert [planned_elastic(gpus, 4).num_ranks for gpus in (1, 3, 4, 5)] == [1, 3, 4, 4]
    assert [planned_elastic(gpus, 0).num_ranks for gpus in (0, 3)] == [2, 3]
    assert {planned_elastic(0, ranks, exact=True).threads for ranks in (1, 2, 4)} == {1}, "of exact sums"


# --- ports


@pytest.mark.parametrize("address", [LOOPBACK, "0.0.0.0"])
def test_port_in_use_is_skipped(address: str) -> None:
    job_id = f"exp/taken-{address}"
    port = port_for(job_id, 1)
    with socket.socket() as listener:
        listener.bind((address, port))
        listener.listen()
        assert free_port(job_id, 1) == port_for(job_id, 2)
    assert free_port(job_id, 1) == port


def test_machine_without_free_ports_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        taken = listener.getsockname()[1]
        monkeypatch.setattr(plans, "port_for", lambda *_: taken)
        with pytest.raises(ConfigError, match=r"^no free port for job exp/first on this machine: `ss -ltnp`"):
            free_port("exp/first", 1)


# --- roles

HYBRID = {"master": 1, "trainer": 1, "parameter_server": 2}


def planned_with_roles(
    num_gpus: int, roles: dict[str, int], cluster: ClusterConfig | None = None, **launch: Any
) -> Plan:
    config = Config(roles=roles, launch=LaunchConfig(**launch), cluster=cluster or ClusterConfig())
    return make_plan(config, Machine(num_cpus=8, num_gpus=num_gpus))


def test_number_of_ranks_may_be_a_multiple_of_a_single_role() -> None:
    plan = planned_with_roles(0, {"stage": 2}, num_ranks=6)
    assert plan.roles is not None
    assert plan.roles.counts == (("stage", 6),)
    assert plan.num_ranks == 6
    assert planned_with_roles(0, {"stage": 2}).num_ranks == 2


def devices(plan: Plan) -> list[str]:
    return [plan.device_of(rank) for rank in range(plan.num_ranks)]


@pytest.mark.parametrize(
    ("num_gpus", "roles", "launch", "message"),
    [
        (0, {}, {"device": "cuda"}, "launch.device=cuda, but no GPU is visible here: use launch.device=auto or cpu"),
        (2, {}, {"num_ranks": 3}, "launch.num_ranks=3, but 2 GPUs are visible: lower it, or use launch.device=cpu"),
        (
            0,
            HYBRID,
            {"num_ranks": 3},
            "roles add up to 4 ranks (master 1, trainer 1, parameter_server 2), but launch.num_ranks=3: leave"
            " launch.num_ranks out, or change one of them",
        ),
        (
            1,
            HYBRID,
            {"devices": {"master": "cpu"}},
            "roles: 3 ranks need a GPU each (trainer 1, parameter_server 2), but 1 are visible: run some roles without"
            " one, as in launch.devices.parameter_server=cpu",
        ),
        (0, HYBRID, {"devices": {"trainer": "cuda"}},
         "launch.devices.trainer=cuda, but no GPU is visible here: use launch.devices.trainer=auto or cpu"),
    ],
)  # fmt: skip
def test_plan_that_does_not_fit_the_machine_is_an_error(
    num_gpus: int, roles: dict[str, int], launch: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        planned_with_roles(num_gpus, roles, **launch)
    assert str(caught.value) == message


def test_roles_on_cpu_need_no_gpu_and_get_the_malloc_variables() -> None:
    plan = planned_with_roles(1, HYBRID, devices={"master": "cpu", "parameter_server": "cpu"})
    assert devices(plan) == ["cpu", "cuda", "cpu", "cpu"]
    # NCCL does not support ranks without a GPU.
    assert (plan.num_ranks, plan.device, plan.backend, plan.threads) == (4, "cuda", "gloo", 2)
    cluster = ClusterConfig(roles={"trainer": RoleRequest(gpus_per_node=1)})
    assert devices(planned_with_roles(1, HYBRID, cluster)) == devices(plan)
    envs = [plan.rank_env(rank, job_id="e/r", attempt=1, master_port=1) for rank in range(4)]
    assert ["MALLOC_TRIM_THRESHOLD_" in env for env in envs] == [True, False, True, True]
    plan = planned_with_roles(2, {"agent": 1, "observer": 1})
    assert (devices(plan), plan.backend) == (["cuda", "cuda"], "nccl")


def test_supervisor_that_ends_before_its_first_state_is_an_error(runs_dir: Path) -> None:
    run = RunDir.create(runs_dir / "exp" / "first")
    run.config.write_text("launch: {device: tpu}\n")
    with pytest.raises(RunFolderError, match=r"^the supervisor of first ended before .*: see \S+/supervisor\.log$"):
        local_launcher.detach(run, os.environ)
    assert "launch.device must be one of" in (run.path / "supervisor.log").read_text()
