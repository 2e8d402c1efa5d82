"""The checks before a submission, with fake Slurm commands; tests/slurm uses a real Slurm."""

import random
import re
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hpcdist_runs import hide_torch
from slurm_recordings import FakeCommands

from hpcdist.cli.run import submission_flags
from hpcdist.config.cluster_schema import ClusterConfig, ContainerConfig, RoleRequest
from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import DataConfig, TrainerConfig
from hpcdist.errors import ConfigError, UserMistake
from hpcdist.host.json_files import write_json
from hpcdist.job import earlier_start, submit, submit_checks
from hpcdist.job.submit_checks import (
    Findings,
    check_config,
    check_partitions,
    check_runs_dir,
    check_submission,
    conflicting_flags,
    gpu_conflicts,
    rejected_flags,
    requested_partitions,
)
from hpcdist.run.create import create_run
from hpcdist.run.folder import RunDir
from hpcdist.slurm.output import NodeGroup, Partition

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

MAIN = "PartitionName=main Default=YES MaxTime=1-00:00:00 State=UP"
SCRIPTS = {
    "scontrol": f"echo '{MAIN}'",
    "sinfo": "echo 'main|4|8|32768|gpu:2|idle|n[1-4]'",
    "sbatch": "echo 'sbatch: Job 1 to start at noon' >&2",
    "sacctmgr": "case \"$*\" in *qos*) echo normal;; *) printf 'ada\\nbob\\n';; esac",
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    """Fake Slurm commands, the only commands on PATH, and folders of runs on a shared file system."""
    monkeypatch.setattr(submit_checks, "mount_of", lambda _: ("nfs4", "server:/home"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    commands = FakeCommands(tmp_path / "bin")
    for name, lines in SCRIPTS.items():
        commands.add_script(name, lines)
    return commands


def reject(slurm: FakeCommands, reason: str) -> None:
    slurm.add_script("sbatch", f"echo 'allocation failure: {reason}' >&2; exit 1")


def check(tmp_path: Path, *, missing_data: str = "", force: bool = False, **config: Any) -> tuple[list[str], str]:
    """Return warnings and estimate of `check_submission`."""
    cluster = ClusterConfig(**config.pop("cluster", {}))
    config = {"experiment": "exp", "name": "first", "runs_dir": str(tmp_path / "runs"), **config}
    return check_submission(Config(cluster=cluster, **config), {}, tmp_path, missing_data=missing_data, force=force)


def test_valid_request_takes_three_commands(slurm: FakeCommands, tmp_path: Path) -> None:
    assert check(tmp_path) == ([], "the job would start at noon")
    *queries, last = slurm.programs()
    assert (sorted(queries), last) == (["scontrol", "sinfo"], "sbatch"), "two concurrent queries, then sbatch"
    assert list(tmp_path.iterdir()) == [slurm.folder]
    slurm.add_script("scontrol", "exit 1")  # without partitions only sbatch checks the request
    assert check(tmp_path, cluster={"partition": "nowhere", "nodes": 9}) == ([], "the job would start at noon")


def test_all_problems_are_reported_at_once(
    slurm: FakeCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit_checks, "mount_of", lambda _: ("ext4", "/dev/sda1"))
    reject(slurm, "Requested node configuration is not available")
    with pytest.raises(ConfigError) as caught:
        check(
            tmp_path,
            missing_data="image_folder was not found in /data",
            data=DataConfig(name="image_folder"),
            cluster={"nodes": 9, "time_limit_min": 1, "signal_lead_s": 60, "qos": "long"},
        )
    nodes, qos, folder, lead, data = caught.value.problems
    assert nodes == "cluster.nodes=9: partition main has 4: lower it or choose another"
    assert qos == "cluster.qos=long: no such QOS, the cluster has normal"
    assert folder.startswith(f"runs_dir={tmp_path}/runs: each machine has its own /tmp")
    assert lead == (
        "cluster.signal_lead_s=60: the run would be stopped at its start, because cluster.time_limit_min=1 is 60 s:"
        " lower the first or raise the second"
    )
    assert data == "image_folder was not found in /data: put it there, or point data.root (or HPCDIST_DATA_DIR) at it"


def test_force_turns_problems_that_slurm_accepts_into_warnings(slurm: FakeCommands, tmp_path: Path) -> None:
    warnings, estimate = check(tmp_path, cluster={"nodes": 9}, force=True)
    assert warnings == ["cluster.nodes=9: partition main has 4: lower it or choose another"]
    assert estimate == "the job would start at noon"
    reject(slurm, "Too many")
    with pytest.raises(ConfigError, match=r"^Slurm rejects this job: Too many$"):
        check(tmp_path)
    # That of `sbatch --test-only`, as well: sbatch decides.
    warnings, _ = check(tmp_path, cluster={"nodes": 9}, force=True)
    assert warnings[1:] == ["Slurm rejects this job: Too many"]


def test_job_that_only_has_to_wait_is_not_rejected(slurm: FakeCommands, tmp_path: Path) -> None:
    """Recorded with Slurm 22.05: `sbatch --test-only` refuses both jobs, sbatch accepts them and they wait."""
    reject(slurm, "Requested node configuration is not available")
    slurm.add_script("sinfo", "echo 'main|2|8|32768|gpu:2|idle|n[1-2]'; echo 'main|2|8|32768|gpu:2|drained|n[3-4]'")
    warnings, _ = check(tmp_path, cluster={"nodes": 4})
    assert warnings == ["only 2 of the 4 matching nodes of main are up: the run will wait"]
    reject(slurm, "Invalid time specified")
    now = int(time.time())
    times = f"StartTime={now + 9000} EndTime={now + 9000 + 3600}"
    slurm.add_script(
        "scontrol", f"case \"$*\" in *reservation*) echo 'ReservationName=r {times}';; *) echo '{MAIN}';; esac"
    )
    reserved = {"sbatch": {"reservation": "r"}, "time_limit_min": 60}
    (warning,) = check(tmp_path, cluster=reserved)[0]
    assert re.fullmatch(r"cluster\.sbatch\.reservation=r begins at [-0-9: ]+: the run will wait until then", warning)
    with pytest.raises(ConfigError, match="Slurm rejects this job: Invalid time specified"):
        check(tmp_path, cluster=reserved | {"time_limit_min": 61})
    reject(slurm, "Invalid qos specification")
    for cluster in (reserved, {"nodes": 4}):
        with pytest.raises(ConfigError, match="Slurm rejects this job: Invalid qos specification"):
            check(tmp_path, cluster=cluster)


def reserve(slurm: FakeCommands, begins_in_min: int, nodes: str = "n[1-4]") -> None:
    """Make scontrol show a maintenance of an hour."""
    begin = int(time.time()) + 60 * begins_in_min
    record = f"ReservationName=maint StartTime={begin} EndTime={begin + 3600} Nodes={nodes} Flags=MAINT"
    slurm.add_script("scontrol", f"case \"$*\" in *reservation*) echo '{record}';; *) echo '{MAIN}';; esac")


def estimate(slurm: FakeCommands, now_if: str) -> None:
    """Make `sbatch --test-only` start scripts with a line like `now_if` now, and others in three hours."""
    now = int(time.time())
    slurm.add_script(
        "sbatch",
        f"start={now + 10800}; while read -r line; do case $line in {now_if}) start={now};; esac; done\n"
        'echo "sbatch: Job 1 to start at $start using 2 processors" >&2',
    )


@pytest.mark.parametrize(
    ("begins_in_min", "now_if", "config", "note"),
    [
        (30, "*--time=25", {}, "the job needs 60 min, and maintenance maint begins in 30 min on all nodes: with"
         " cluster.time_limit_min=25 it would start now, and it continues by itself afterwards"),
        (30, "*--time=25", {"trainer": TrainerConfig(script=["/bin/true"])}, "the job needs 60 min, and maintenance"
         " maint begins in 30 min on all nodes: with cluster.time_limit_min=25 it would start now, and is requeued"
         " afterwards: a script continues from its own checkpoints"),
        (300, "*--time=30", {}, "the job would wait: with cluster.time_limit_min=30 it would start now, and it"
         " continues by itself afterwards"),
        (300, "*--nodes=1", {"data": DataConfig(global_batch_size=64)},
         "the job would wait: with cluster.nodes=1 it would start now"),
        (300, "never", {}, ""),
    ],
    ids=["maintenance", "script", "backfill", "nodes", "nothing"],
)  # fmt: skip
def test_note_names_the_largest_request_that_starts_now(
    slurm: FakeCommands, tmp_path: Path, begins_in_min: int, now_if: str, config: dict[str, Any], note: str
) -> None:
    reserve(slurm, begins_in_min)
    estimate(slurm, now_if)
    warnings, text = check(tmp_path, cluster={"nodes": 4, "time_limit_min": 60}, **config)
    assert warnings == ([note] if note else [])
    assert text.startswith("the job would start at 20")
    assert slurm.programs().count("sbatch") <= 1 + earlier_start.MAX_TRIES


def test_maintenance_that_begins_soon_is_named(slurm: FakeCommands, tmp_path: Path) -> None:
    reserve(slurm, 4)
    estimate(slurm, "never")
    (note,) = check(tmp_path, cluster={"time_limit_min": 60})[0]
    assert note.startswith("the job needs 60 min, and maintenance maint begins in 4 min on all nodes: it waits for the")


def test_job_that_slurm_refuses_for_a_reservation_only_waits(slurm: FakeCommands, tmp_path: Path) -> None:
    """Recorded with Slurm 22.05: `sbatch --test-only` refuses the job, sbatch accepts it."""
    reserve(slurm, 10, "n1")
    reject(slurm, "Requested node configuration is not available")
    (note,) = check(tmp_path, cluster={"nodes": 4, "time_limit_min": 20})[0]
    assert note.startswith("the job needs 20 min, and maintenance maint begins in 10 min on 1 of 4 nodes: it waits")
    reserve(slurm, 300)
    with pytest.raises(ConfigError, match="Requested node configuration is not available"):
        check(tmp_path, cluster={"nodes": 4, "time_limit_min": 20})


def test_unreadable_reservations_do_not_prevent_a_submission(slurm: FakeCommands, tmp_path: Path) -> None:
    estimate(slurm, "never")
    for nodes in ("n[1-", "?"):
        reserve(slurm, 30, nodes)
        assert check(tmp_path, cluster={"time_limit_min": 60})[0] == []


def test_later_start_that_the_user_asks_for_gets_no_note(slurm: FakeCommands, tmp_path: Path) -> None:
    estimate(slurm, "never")
    config = Config(experiment="exp", name="first", runs_dir=str(tmp_path / "runs"))
    flags = {"begin": "now+3hours"}
    assert check_submission(config, flags, tmp_path, missing_data="", force=False)[0] == []
    assert slurm.programs().count("sbatch") == 1


def test_rejected_account_is_reported_with_the_users_accounts(slurm: FakeCommands, tmp_path: Path) -> None:
    reject(slurm, "Invalid account")
    error = "Slurm rejects this job: Invalid account"
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, cluster={"account": "eve", "nodes": 9})
    assert caught.value.problems[1] == f"cluster.account=eve: {error}; your accounts are ada, bob"
    (slurm.folder / "sacctmgr").unlink()
    with pytest.raises(ConfigError) as caught:
        check(tmp_path)
    assert caught.value.problems == (f"cluster.account is not set: {error}",)


def test_submit_without_slurm_names_the_alternatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserMistake, match=r"^sbatch is not installed here: .* or show the script with --dry-run$"):
        check(tmp_path)


def test_config_and_request_problems_are_reported_together(slurm: FakeCommands, tmp_path: Path) -> None:
    trainer = TrainerConfig(target="nosuch:train")
    roles = {"worker": RoleRequest(nodes=2, gpus_per_node=9)}
    cluster = {"roles": roles, "sbatch": {"nodes": "3"}, "mem": "lots"}
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, trainer=trainer, roles={"server": 1, "worker": 4}, cluster=cluster)
    nodes, memory, target, gpus = caught.value.problems
    assert nodes.startswith("cluster.sbatch.nodes repeats a key of the config")
    assert memory == "cluster.mem=lots is not a memory size: write 64G, or MiB without a unit"
    assert target.startswith("trainer.target: ")
    assert gpus == "cluster.gpus_per_node=9: partition main offers at most 2 GPUs per node: lower it or choose another"
    assert "sbatch" not in slurm.programs()
    assert check_submission(Config(trainer=trainer), {}, None, missing_data="", force=False)[0] == [], (
        "an existing run has its own code"
    )


def test_warnings(slurm: FakeCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "main")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    save = tmp_path / "runs" / "exp" / "before" / "checkpoints" / "step-00000010"
    save.mkdir(parents=True)
    write_json(save / "manifest.json", {"write_s": 70.4})
    warnings, _ = check(tmp_path, missing_data="mnist was not found in /data")
    assert warnings == [
        "cluster.signal_lead_s=120: run before needed 70 s for a checkpoint: set at least twice that,"
        " cluster.signal_lead_s=141",
        "mnist was not found in /data: the nodes will download it if they have internet access",
        "SBATCH_PARTITION in your environment overrides the batch script: unset it if you do not need it",
        "submitted from inside job 41: its variables do not reach the new job",
    ]


def test_ranks_with_the_python_of_the_submission_need_its_torch(
    slurm: FakeCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_torch(monkeypatch)
    with pytest.raises(ConfigError, match=r"^trainer\.target=ddp needs torch, .* or set container\.image or cluster"):
        check(tmp_path)
    (forced,) = check(tmp_path, force=True)[0]
    (provided,) = check(tmp_path, cluster={"setup": ["module load pytorch"]})[0]
    assert forced == provided
    (tmp_path / "packages" / "torch").mkdir(parents=True)
    (tmp_path / "packages" / "torch" / "__init__.py").touch()
    assert check(tmp_path, cluster={"env": {"PYTHONPATH": str(tmp_path / "packages")}})[0] == []


def test_secrets_in_batch_script_or_command_line_are_rejected(slurm: FakeCommands, tmp_path: Path) -> None:
    config = Config(
        runs_dir=str(tmp_path),
        cluster=ClusterConfig(
            setup=["export HF_TOKEN=s3cret", "export B_TOKEN=$(cat ~/.token)"],
            srun={"comment": "WANDB_API_KEY=s3cret"},
            env={"FINE_TOKEN": "s3cret"},
        ),
        container=ContainerConfig(runtime="apptainer", image="/i", extra_args=["--env=A_KEY=s3cret"]),
    )
    with pytest.raises(ConfigError) as caught:
        check_config(config, tmp_path)
    assert [line.partition(" holds a secret, which other users")[0] for line in caught.value.problems] == [
        "cluster.srun.comment",
        "cluster.setup",
        "container.extra_args",
    ]
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        check_submission(config, {}, tmp_path, missing_data="", force=True)
    assert len(caught.value.problems) == 3
    assert slurm.calls() == []  # no program was started with the secret in its arguments
    assert "pass it as an environment variable, such as cluster.env.MY_TOKEN='${oc.env:MY_TOKEN}'" in str(caught.value)


def test_script_that_starts_its_own_ranks_has_one_task(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed as dist\nimport torch.multiprocessing as mp\n"
        "def run(rank): dist.init_process_group('gloo')\nmp.spawn(run, nprocs=2)\n"
    )
    runs = tmp_path / "runs"

    def config(**cluster: Any) -> Config:
        trainer = TrainerConfig(script=[str(script)])
        return Config(name="first", runs_dir=str(runs), trainer=trainer, cluster=ClusterConfig(**cluster))

    check_config(config(gpus_per_node=4), tmp_path)
    starts = "train.py starts its own ranks (torch.multiprocessing.spawn in train.py:4)"
    with pytest.raises(ConfigError) as caught:
        check_config(config(nodes=2, tasks_per_node=4), tmp_path)
    (problem,) = caught.value.problems
    once = "set cluster.nodes=1 cluster.tasks_per_node=1, or let the script read RANK, "
    assert problem.startswith(f"cluster.nodes=2 cluster.tasks_per_node=4, but {starts}: {once}")
    run = create_run(config(), tmp_path, launcher="slurm")
    script.write_text("print('hello')\n")
    check_config(config(nodes=2), tmp_path)
    assert run.path.is_dir()
    with pytest.raises(ConfigError, match=r"^cluster\.nodes=2, but "):
        check_config(config(nodes=2), None)  # a resume, for which the copy of the code counts


@pytest.mark.parametrize(
    ("cluster", "env", "place"),
    [
        ({"sbatch": {"gres": "nvme:1,gpu:a100:4"}}, {}, "cluster.sbatch.gres (nvme:1,gpu:a100:4)"),
        ({"srun": {"gres": "gpu"}}, {}, "cluster.srun.gres (gpu)"),
        ({}, {"SBATCH_GRES": "gpu:2"}, "SBATCH_GRES in your environment (gpu:2)"),
        ({}, {"SLURM_GRES": "gres/gpu:2"}, "SLURM_GRES in your environment (gres/gpu:2)"),
        ({"sbatch": {"gres": "gpu_scratch:1"}, "srun": {"gres": "none"}}, {"SBATCH_GRES": "license:1"}, ""),
        ({"sbatch": {"gres": "gpu:a100:4"}, "gpus_per_node": 0}, {"SBATCH_GRES": "gpu:2"}, ""),
    ],
)
def test_second_request_for_gpus(cluster: dict[str, Any], env: dict[str, str], place: str) -> None:
    found = gpu_conflicts(ClusterConfig(**{"gpus_per_node": 4, "gpu_type": "h100", **cluster}), env)
    why = "requests GPUs beside cluster.gpus_per_node=h100:4, which Slurm refuses: remove it;"
    assert found == ([f"{place} {why} cluster.gpus_per_node: a100:4 requests a type"] if place else [])
    (both,) = gpu_conflicts(ClusterConfig(sbatch={"gres": "gpu:1"}), {"SBATCH_GPUS_PER_NODE": "1"})
    assert both.startswith("cluster.sbatch.gres (gpu:1) requests GPUs beside SBATCH_GPUS_PER_NODE, which Slurm refuses")


def test_second_request_for_gpus_is_found_before_submission(
    slurm: FakeCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_GRES", "gpu:1")
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, cluster={"gpus_per_node": 1, "sbatch": {"gres": "gpu:1"}}, force=True)
    assert [line.split(" (gpu:1) ")[0] for line in caught.value.problems] == [
        "cluster.sbatch.gres",
        "SBATCH_GRES in your environment",
    ]
    assert "sbatch" not in slurm.programs()


# --- Comparison of requests with partitions: each problem is one line with key, value and fix.


BIG = NodeGroup(
    partition="gpu", num_nodes=2, cpus=64, memory_mb=256000, gpus=4, gpu_types={"a100": 4}, usable=True, names="n[1-2]"
)
SMALL = NodeGroup(partition="gpu", num_nodes=2, cpus=16, memory_mb=64000, gpus=0, usable=True, names="n[3-4]")
GPU = Partition(name="gpu", facts={"Default": "YES", "State": "UP"}, nodes=(BIG, SMALL))
FITTING: dict[str, Any] = {"nodes": 2, "tasks_per_node": 4, "cpus_per_task": 8, "gpus_per_node": 4, "mem": "200G"}


def found(partition: Partition = GPU, **cluster: Any) -> Findings:
    findings = Findings()
    check_partitions(ClusterConfig(**cluster), [partition], findings)
    return findings


def of(**facts: str) -> Partition:
    return replace(GPU, facts={**GPU.facts, **facts})


def test_valid_request() -> None:
    for partition in (GPU, replace(GPU, nodes=())):  # one without visible nodes is not checked
        assert found(partition, **FITTING) == Findings()
    assert found(**FITTING, gpu_type="a100") == found(nodes=4) == Findings()
    assert found(nodes=9, min_nodes=4) == Findings(), "Slurm starts the job with four of up to nine nodes"


@pytest.mark.parametrize(
    ("facts", "cluster", "line"),
    [
        ({}, {"nodes": 4, "spare_nodes": 1},
         "cluster.nodes=4 and cluster.spare_nodes=1: partition gpu has 4: lower it or choose another"),
        ({"MaxTime": "00:30:00"}, {"time_limit_min": 60}, "cluster.time_limit_min=60: partition gpu allows 30: lower"
         " it; a longer run saves, requeues itself and continues"),
        ({}, {"nodes": 9, "min_nodes": 5}, "cluster.min_nodes=5: partition gpu has 4: lower it or choose another"),
        ({"MaxNodes": "2"}, {"nodes": 3},
         "cluster.nodes=3: partition gpu allows 2 per job: lower it or choose another"),
        ({}, {"tasks_per_node": 13, "cpus_per_task": 5}, "cluster.tasks_per_node=13 × cluster.cpus_per_task=5:"
         " partition gpu offers at most 64 cores per node: lower it or choose another"),
        ({}, {"mem": "1T"},
         "cluster.mem=1T: partition gpu offers at most 256000 MiB per node: lower it or choose another"),
        ({}, {"nodes": 3, "gpus_per_node": 1},
         "cluster.nodes=3: 2 nodes of partition gpu have the requested hardware: lower the number or the request"),
        ({}, {"gpu_type": "h100", "gpus_per_node": 2}, "cluster.gpus_per_node=h100:2: partition gpu offers at most 0"
         " GPUs of type h100 (its types: a100) per node: lower it or choose another"),
        ({}, {"nodes": 3, "gpu_type": "a100", "gpus_per_node": 1},
         "cluster.nodes=3: 2 nodes of partition gpu have the requested hardware: lower the number or the request"),
        ({"AllowAccounts": "ada"}, {"account": "eve"}, "cluster.account=eve may not use partition gpu: use ada"),
    ],
)  # fmt: skip
def test_impossible_request_is_an_error(facts: dict[str, str], cluster: dict[str, Any], line: str) -> None:
    assert found(of(**facts), **cluster) == Findings(errors=[line])


def test_doubtful_request_is_a_warning() -> None:
    down = replace(GPU, nodes=(replace(BIG, usable=False), SMALL))
    assert [*found(of(State="DOWN")).warnings, *found(down, nodes=3).warnings] == [
        "cluster.partition=gpu starts no jobs (state DOWN): the run will wait",
        "only 2 of the 4 matching nodes of gpu are up: the run will wait",
    ]


def test_requested_partitions() -> None:
    findings = Findings()
    other = replace(GPU, name="other", facts={})
    assert requested_partitions(ClusterConfig(), [other, GPU], findings) == [GPU], "the default one"
    assert requested_partitions(ClusterConfig(partition="other,gpu"), [other, GPU], findings) == [other, GPU]
    tight = of(MaxTime="00:30:00", MaxNodes="1")
    check_partitions(ClusterConfig(nodes=2), [tight, GPU], findings)  # it must fit one of them
    assert findings == Findings()
    check_partitions(ClusterConfig(nodes=2), [tight, of(MaxNodes="1")], findings)
    for name in ("ohter", "cpu-long"):
        assert requested_partitions(ClusterConfig(partition=name), [other, GPU], findings) == []
    assert findings.errors == [
        "cluster.nodes=2: partition gpu allows 1 per job: lower it or choose another",
        "cluster.partition=ohter: no such partition, did you mean 'other'?",
        "cluster.partition=cpu-long: no such partition, the cluster has gpu, other",
    ]


# --- The check that the nodes can see the runs folder.


def test_nodes_must_see_the_folder(slurm: FakeCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = Findings()
    for kind in ("nfs4", "fuse.juicefs", ""):
        check_runs_dir(Path("/tmp/runs"), kind, findings)
    assert findings == Findings()
    for folder, kind in (("/tmp/runs", "ext4"), ("/scratch", "tmpfs"), ("/home/ada/runs", "xfs")):
        check_runs_dir(Path(folder), kind, findings)
    seen = "and the nodes would not see the run folder: set runs_dir (or HPCDIST_RUNS_DIR) to a folder on a shared file"
    assert findings.errors == [
        f"runs_dir=/tmp/runs: each machine has its own /tmp, {seen} system",
        f"runs_dir=/scratch: tmpfs is in this machine's memory, {seen} system",
    ]
    assert findings.warnings == [
        "runs_dir=/home/ada/runs is on xfs, a file system of this machine: the nodes must see it under the same path"
    ]
    # The only node of the partition is this machine.
    slurm.add_script("sinfo", "echo 'main|1|8|32768|gpu:2|idle|login'")
    monkeypatch.setattr(submit_checks, "mount_of", lambda _: ("ext4", "/dev/sda1"))
    monkeypatch.setattr(socket, "gethostname", lambda: "login.site")
    assert check(tmp_path)[0] == []


# --- additional flags of sbatch and srun


def test_flags_that_hpcdist_sets_are_rejected() -> None:
    cluster = ClusterConfig(
        sbatch={"nodes": "3", "time": "1", "output": "x", "mail-type": "FAIL", "ntasks_per_node": "2"},
        srun={"cpus-per-task": "2", "kill-on-bad-exit": "0", "export": "NONE", "mpi": "none"},
    )
    assert conflicting_flags(cluster) == [
        "cluster.sbatch.nodes repeats a key of the config: use cluster.nodes",
        "cluster.sbatch.time repeats a key of the config: use cluster.time_limit_min",
        "cluster.sbatch.output: hpcdist controls --output: remove it",
        "cluster.sbatch.ntasks_per_node repeats a key of the config: use cluster.tasks_per_node",
        "cluster.srun.cpus-per-task repeats a key of the config: use cluster.cpus_per_task",
        "cluster.srun.kill-on-bad-exit: hpcdist controls --kill-on-bad-exit: remove it",
        "cluster.srun.export: hpcdist controls --export: remove it",
    ]
    assert conflicting_flags(ClusterConfig(sbatch={"no_kill": "true", "mincpus": "4"})) == [], "of a fixed size"
    assert conflicting_flags(ClusterConfig(nodes=4, min_nodes=2, sbatch={"mincpus": "4"}))
    assert conflicting_flags(ClusterConfig(sbatch={"segment": "2", "requeue": "expedite"})) == []


def test_flags_that_srun_rejects_are_reported(commands: FakeCommands) -> None:
    assert rejected_flags({"foo": "1"}) == [], "there is no srun"
    commands.add_script(
        "srun",
        """for option in "$@"; do case "$option" in
    --mpi=none|--exact) ;;
    --help) exit 0 ;;
    *) echo "srun: unrecognized option '$option'" >&2; echo 'Try "srun --help" for more information' >&2; exit 255 ;;
esac; done""",
    )
    flags = {"mpi": "none", "exact": "true", "label": "false", "nodes": "3", "foo": "1"}
    assert rejected_flags(flags) == ["cluster.srun.foo=1: srun rejects it: unrecognized option '--foo=1'"]
    assert commands.calls() == ["srun --mpi=none --help", "srun --exact --help", "srun --foo=1 --help"]


# --- Strings of the config in batch scripts: malicious ones are rejected or quoted.


PIECES = (
    *("\n", "\r", "\x1b", "\u2028", "'", '"', "`touch x`", "$(touch x)", "; touch x;", "&& touch x", "|| touch x"),
    *("#", "\\", "$HOME", "${IFS}", "größe", "-", " ", "*", "{a,b}", "!x", "\n#SBATCH --uid=0\n", "EOF\n", "%j"),
)
TEXT_KEYS = (
    *(f"cluster.{name}" for name in ("partition", "account", "qos", "mem", "constraint", "exclude")),
    *("cluster.sbatch.comment", "cluster.srun.comment", "cluster.env.GREETING"),
    *("launch.env.GREETING", "container.image", "experiment", "name", "runs_dir", "data.root"),
)
LIST_KEYS = ("container.mounts", "container.extra_args", "container.env")
NAME_KEYS = ("cluster.env", "launch.env", "cluster.sbatch", "cluster.srun", "roles")


def hostile(seed: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 5)))


def tree_with(keys: list[str], value: object) -> dict[str, object]:
    tree = value
    for key in reversed(keys):
        tree = {key: tree}
    assert isinstance(tree, dict)
    return tree


def rendered(path: Path, tree: dict[str, object]) -> tuple[str, dict[str, str]] | None:
    """Return the text of a dry run and the variables that its script sets; None if the config is rejected."""
    path.write_text(yaml.safe_dump(tree, allow_unicode=True))
    overrides = ["container.runtime=pyxis", *(["container.image=i"] if "container" not in tree else [])]
    try:
        config = load_config(path, overrides)
        script, step = submit.render(config, RunDir(Path(config.runs_dir) / config.experiment / (config.name or "r")))
    except UserMistake:
        return None
    return f"{script}\n# then:\n{submit.commented(step)}\n", dict(config.cluster.env)


def test_hostile_text_is_rejected_or_quoted(tmp_path: Path) -> None:
    """Each script runs in a shell, in a folder that must stay empty."""
    folder = tmp_path / "empty"
    folder.mkdir()
    cases: list[tuple[str, dict[str, object]]] = []
    for text in map(hostile, range(4)):
        cases += [(key, tree_with(key.split("."), text)) for key in TEXT_KEYS]
        cases += [(key, tree_with(key.split("."), [text])) for key in LIST_KEYS]
        cases += [(key, tree_with([*key.split("."), text], 1)) for key in NAME_KEYS]
    num_accepted = 0
    for number, (key, tree) in enumerate(cases):
        found = rendered(tmp_path / "run.yaml", tree)
        if found is None:
            continue
        num_accepted += 1
        text, variables = found
        # Only variables and comments: the supervisor must not start.
        head = text.partition("trap 'left=0' TERM")[0]
        tail = text.partition("# then:\n")[2]
        names = " ".join(f'"${name}"' for name in variables) or '""'
        script = f"{head}\n{tail}\nprintf '%s\\0' {names}\n"
        shell, env = ["bash", "--norc", "-c", script], {"PATH": "/usr/bin:/bin"}
        done = subprocess.run(shell, cwd=folder, env=env, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b""), (key, tree)
        if variables:
            assert done.stdout.decode().split("\0")[:-1] == list(variables.values()), (key, tree)
        if number % 10 == 0:
            whole = subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True, check=False)
            assert whole.returncode == 0, (key, tree, whole.stderr)
    assert num_accepted > 15
    assert not [*folder.iterdir()]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("cluster.partition=\"a\\nb\"", "cluster.partition must be one line without control characters, got 'a\\nb'"),
        ("cluster.sbatch={comment: \"a\\nb\"}", "cluster.sbatch.comment must be one line without control characters"),
        ("cluster.env={'A B': c}", "cluster.env: 'A B' is not a valid variable name: use letters, digits and '_'"),
        ("cluster.env={A: \"a\\0b\"}", "cluster.env.A must not contain a NUL character"),
        ("cluster.setup=[\"a\\0b\"]", "cluster.setup must not contain a NUL character"),
        ("cluster.sbatch={'x y': c}", "cluster.sbatch: 'x y' is not an option: use its long name without dashes, such"),
        ("cluster.srun={--mpi: none}", "cluster.srun: '--mpi' is not an option: use its long name without dashes"),
        ("cluster.sbatch={N: 3}", "cluster.sbatch: 'N' is not an option: use its long name without dashes, such"),
        ("container.extra_args=[\"a\\nb\"]", "container.extra_args must be one line without control characters"),
        ("runs_dir=\"a\\nb\"", "runs_dir must be one line without control characters, got"),
    ],
)  # fmt: skip
def test_what_no_script_can_hold(override: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("ddp_digits", [override])
    assert [line for line in caught.value.problems if line.startswith(problem)], caught.value.problems
    assert len(str(caught.value)) < 400


def test_other_texts_of_a_script() -> None:
    with pytest.raises(UserMistake, match=r"^--begin must be one line .* characters, got 'now\\ntouch x'$"):
        submission_flags(None, "now\ntouch x")
    assert submit.commented("srun 'a\nb'") == "# srun 'a\n# b'"
