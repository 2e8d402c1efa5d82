"""The checks before a submission, with fake Slurm commands; tests/slurm uses a real Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from absent_torch import hide_torch
from slurm_recordings import FakeCommands

from hpcdist.config.launch_schema import ClusterConfig, ContainerConfig, RoleRequest
from hpcdist.config.schema import Config, DataConfig, TrainerConfig
from hpcdist.errors import ConfigError, UserMistake
from hpcdist.host.files import write_json
from hpcdist.slurm.job.submit_checks import check_config, check_submission, longest_save

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
    """Fake Slurm commands, the only commands on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    commands = FakeCommands(folder)
    for name, lines in SCRIPTS.items():
        commands.add_script(name, lines)
    return commands


def reject(slurm: FakeCommands, reason: str) -> None:
    slurm.add_script("sbatch", f"echo 'allocation failure: {reason}' >&2; exit 1")


def check(tmp_path: Path, *, missing_data: str = "", force: bool = False, **config: Any) -> tuple[list[str], str]:
    """Return warnings and estimate of `check_submission`; by default `shared_runs` is set."""
    cluster = ClusterConfig(**{"shared_runs": True, **config.pop("cluster", {})})
    config = {"experiment": "exp", "name": "first", "runs_dir": str(tmp_path / "runs"), **config}
    return check_submission(Config(cluster=cluster, **config), {}, tmp_path, missing_data=missing_data, force=force)


def test_valid_request_takes_three_commands(slurm: FakeCommands, tmp_path: Path) -> None:
    assert check(tmp_path) == ([], "the job would start at noon")
    *queries, last = slurm.programs()
    assert (sorted(queries), last) == (["scontrol", "sinfo"], "sbatch"), "two concurrent queries, then sbatch"
    assert list(tmp_path.iterdir()) == [slurm.folder]


def test_all_problems_are_reported_at_once(slurm: FakeCommands, tmp_path: Path) -> None:
    reject(slurm, "Requested node configuration is not available")
    with pytest.raises(ConfigError) as caught:
        check(
            tmp_path,
            missing_data="mnist was not found in /data",
            data=DataConfig(download=False),
            cluster={"nodes": 9, "time_limit_min": 1, "signal_lead_s": 60, "shared_runs": False, "qos": "long"},
        )
    nodes, qos, folder, lead, data = caught.value.problems
    assert nodes == "cluster.nodes=9: partition main has 4: lower it or choose another"
    assert qos == "cluster.qos=long: no such QOS, the cluster has normal"
    assert folder.startswith(f"runs_dir={tmp_path}/runs: each machine has its own /tmp")
    assert lead == (
        "cluster.signal_lead_s=60: the run would be stopped at its start, because cluster.time_limit_min=1 is 60 s:"
        " lower the first or raise the second"
    )
    assert data == "mnist was not found in /data: put it there, or point data.root (or HPCDIST_DATA_DIR) at it"


def test_force_turns_problems_that_slurm_accepts_into_warnings(slurm: FakeCommands, tmp_path: Path) -> None:
    warnings, estimate = check(tmp_path, cluster={"nodes": 9}, force=True)
    assert warnings == ["cluster.nodes=9: partition main has 4: lower it or choose another"]
    assert estimate == "the job would start at noon"
    reject(slurm, "Too many")
    with pytest.raises(ConfigError, match=r"^Slurm rejects this job: Too many$"):
        check(tmp_path, cluster={"nodes": 9}, force=True)


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


def test_problems_of_the_config_are_reported_with_those_of_the_request(slurm: FakeCommands, tmp_path: Path) -> None:
    trainer = TrainerConfig(target="nosuch:train")
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, trainer=trainer, cluster={"nodes": 9, "sbatch": {"time": "3"}})
    assert [problem.split(" ")[0] for problem in caught.value.problems] == [
        "cluster.sbatch.time",
        "trainer.target:",
        "cluster.nodes=9:",
    ]
    assert "sbatch" not in slurm.programs()
    config = Config(trainer=trainer, cluster=ClusterConfig(sbatch={"time": "3"}))
    with pytest.raises(
        ConfigError, match=r"2 mistakes\n  - cluster\.sbatch\.time repeats a key .*\n  - trainer\.target: "
    ):
        check_config(config, tmp_path)
    check_config(Config(), tmp_path)
    config = Config(trainer=trainer, cluster=ClusterConfig(shared_runs=True))
    assert check_submission(config, {}, None, missing_data="", force=False)[0] == [], "an existing run has its own code"


def test_warnings(slurm: FakeCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "main")
    save = tmp_path / "runs" / "exp" / "before" / "checkpoints" / "step-00000010"
    save.mkdir(parents=True)
    write_json(save / "manifest.json", {"write_s": 70.4})
    warnings, _ = check(tmp_path, missing_data="mnist was not found in /data")
    assert warnings == [
        "cluster.signal_lead_s=120: run before needed 70 s for a checkpoint: set at least twice that,"
        " cluster.signal_lead_s=141",
        "mnist was not found in /data: the nodes will download it if they have internet access",
        "SBATCH_PARTITION in your environment overrides the batch script: unset what you do not need",
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
    assert check(tmp_path, cluster={"env": {"PYTHONPATH": str(fake_torch(tmp_path))}})[0] == []


def fake_torch(folder: Path) -> Path:
    """Return a folder with a package torch."""
    (folder / "packages" / "torch").mkdir(parents=True)
    (folder / "packages" / "torch" / "__init__.py").touch()
    return folder / "packages"


def test_script_needs_no_dataset(slurm: FakeCommands, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    trainer = TrainerConfig(script=[str(script)])
    assert check(tmp_path, missing_data="none", trainer=trainer, data=DataConfig(download=False))[0] == []


def test_only_sbatch_checks_the_request_if_queries_fail(slurm: FakeCommands, tmp_path: Path) -> None:
    slurm.add_script("scontrol", "exit 1")
    assert check(tmp_path, cluster={"partition": "nowhere", "nodes": 9}) == ([], "the job would start at noon")


def test_error_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserMistake, match=r"^sbatch is not installed here: submit from a login node, or show .* --dry-run$"
    ):
        check(tmp_path)


def test_longest_save_of_an_experiment(tmp_path: Path) -> None:
    assert longest_save(tmp_path) == (0.0, "")
    for name, content in (("old", {"step": 1}), ("a", {"write_s": 1.5}), ("b", {"write_s": 12.0})):
        folder = tmp_path / name / "checkpoints" / "step-00000001"
        folder.mkdir(parents=True)
        write_json(folder / "manifest.json", content)
    assert longest_save(tmp_path) == (12.0, "b")


def test_requests_of_roles_are_checked(slurm: FakeCommands, tmp_path: Path) -> None:
    roles = {
        "server": RoleRequest(partition="mian"),
        "worker": RoleRequest(nodes=2, gpus_per_node=9, sbatch={"nodes": "3"}),
    }
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, roles={"server": 1, "worker": 4}, cluster={"roles": roles})
    assert caught.value.problems[1:3] == (
        "cluster.partition=mian: no such partition, did you mean 'main'?",
        "cluster.gpus_per_node=9: partition main offers at most 2 GPUs per node: lower it or choose another",
    )
    assert caught.value.problems[0].startswith("cluster.sbatch.nodes")


def test_secrets_in_the_batch_script_or_a_command_line_are_rejected(slurm: FakeCommands, tmp_path: Path) -> None:
    config = Config(
        runs_dir=str(tmp_path),
        cluster=ClusterConfig(
            setup=["export HF_TOKEN=s3cret", "export B_TOKEN=$(cat ~/.token)"],
            srun={"export": "ALL,WANDB_API_KEY=s3cret"},
            env={"FINE_TOKEN": "s3cret"},
        ),
        container=ContainerConfig(runtime="podman", image="i", extra_args=["--env=A_KEY=s3cret"]),
    )
    with pytest.raises(ConfigError) as caught:
        check_config(config, tmp_path)
    assert [line.partition(" holds a secret, which other users")[0] for line in caught.value.problems] == [
        "cluster.srun.export",
        "cluster.setup",
        "container.extra_args",
    ]
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        check_submission(config, {}, tmp_path, missing_data="", force=True)
    assert len(caught.value.problems) == 3
    assert slurm.calls() == []  # no program was started with the secret in its arguments
    assert "pass it as an environment variable, such as cluster.env.MY_TOKEN='${oc.env:MY_TOKEN}'" in str(caught.value)
