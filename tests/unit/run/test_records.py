"""The records of a run folder: a resume's config, parameters, secrets and saved checkpoints."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.schema import Config
from hpcdist.config.written import read_stored, run_yaml
from hpcdist.errors import ConfigError, RunFolderError
from hpcdist.host.json_files import write_json
from hpcdist.job.preflight_step import newest_checkpoint_bytes
from hpcdist.review.facts import read_checkpoints
from hpcdist.review.ledger import allocations_of
from hpcdist.run import checkpoint_files, config_change, config_origin, kept_secrets, resume_text, run_parameters
from hpcdist.run.folder import RunDir, Status
from hpcdist.run.job_record import all_job_starts, job_starts
from hpcdist.run.status import keep_job, update_job_starts
from hpcdist.slurm import client
from hpcdist.slurm.output import AccountedStart, SlurmError

# --- The changed config of a resume, and the parameters of a run


@pytest.fixture
def run(runs_dir: Path) -> RunDir:
    run = RunDir.create(runs_dir / "exp" / "first")
    run.config.write_text(run_yaml(config(runs_dir)))
    attempt = run.new_attempt()
    checkpoint = run.checkpoints / "step-00000040"
    checkpoint.mkdir()
    write_json(checkpoint / "manifest.json", {"step": 40})
    write_json(attempt.beat(0), beat(40))
    run.write_state(replace(run.read_state(), status="stopped", attempt=1))
    return run


def config(runs_dir: Path, *overrides: str) -> Config:
    return load_config("ddp_digits", [f"runs_dir={runs_dir}", "name=first", *overrides])


def beat(step: int) -> dict[str, Any]:
    return {"time": 1.0, "step": step, "total_steps": 90, "metrics": {}}


def lr(path: Path) -> float:
    return float(yaml.safe_load(path.read_text())["optim"]["lr"])


def test_changed_config_stays_and_each_attempt_keeps_its_own(run: RunDir, runs_dir: Path) -> None:
    for value in ("0.5", "0.6"):  # of two resumes before the next attempt
        config_change.change_config(run, config(runs_dir, f"optim.lr={value}"))
    second = run.new_attempt()
    config_change.change_config(run, config(runs_dir, "optim.lr=0.6"))
    assert not second.config.exists(), "nothing was changed"
    config_change.change_config(run, config(runs_dir, "optim.lr=0.7"))
    assert [lr(path) for path in (run.attempt(1).config, second.config, run.config)] == [0.002, 0.6, 0.7]


def test_change_incompatible_with_the_checkpoint_is_an_error(run: RunDir, runs_dir: Path) -> None:
    changed = config(runs_dir, "model.name=resnet18", "optim.name=sgd", "optim.lr=0.5")
    with pytest.raises(ConfigError) as found:
        config_change.check(run, changed)
    assert found.value.problems == (
        "model.name was 'simple_cnn' when the checkpoint of step 40 was written and cannot be 'resnet18' now: leave it"
        " out, or start a new run",
        "optim.name was 'adam' when the checkpoint of step 40 was written and cannot be 'sgd' now: leave it out, or"
        " start a new run",
    )
    config_change.check(run, config(runs_dir, "optim.lr=0.5", "stop.max_epochs=20"))
    (run.checkpoints / "step-00000040" / "manifest.json").unlink()
    config_change.check(run, changed)


# --- interpolations


@pytest.mark.parametrize("text", ["${oc.env:VICTIM_SECRET}", "${"])
def test_interpolation_in_a_run_config_is_never_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Also in a file that hpcdist has not written."""
    monkeypatch.setenv("VICTIM_SECRET", "hunter2")
    path = tmp_path / "config.yaml"
    path.write_text(f"experiment: digits\ntracking: {{uri: 'http://evil/{text}'}}\n")
    for overrides in ([], ["experiment=${oc.env:VICTIM_SECRET}"]):
        found = load_run_config(path, overrides, {}, require_secrets=False)
        assert (found.tracking.uri, found.experiment) == (f"http://evil/{text}", "hunter2" if overrides else "digits")


# --- Parameters of a run: those of a trainer of the user's own, and of a script.
def parameters_of(tmp_path: Path, yaml: str, *overrides: str, changed: str = "") -> dict[str, Any]:
    """Return the parameters of a run of a YAML and overrides, in whose config an override is `changed` later."""
    config = tmp_path / "mine.yaml"
    config.write_text(yaml)
    run = RunDir.create(tmp_path / "runs" / "digits" / "first")
    run.config.write_text(run_yaml(load_config(config, [*overrides, *filter(None, [changed])])))
    config_origin.write_origin(run, config_origin.load_origin(str(config), overrides))
    return run_parameters.parameters(run, read_stored(run.config))


OWN = """
experiment: mine
trainer: mine:train
optim: {lr: 0.001}
stop: {max_steps: 5}
params: {hidden: 32, layers: {count: 2}}
"""


def test_own_trainer_has_what_was_written_and_its_params(tmp_path: Path) -> None:
    overrides = ["name=first", "data.batch_size=64", "params.total_steps=7", "roles={a: 1, b: 2}"]
    assert parameters_of(tmp_path, OWN, *overrides, changed="optim.weight_decay=0.1") == {
        "trainer.target": "mine:train",
        "seed": 0,
        "optim.lr": 0.001,  # the default, but written
        "optim.weight_decay": 0.1,
        "data.batch_size": 64,
        "stop.max_steps": 5,
        "roles.a": 1,
        "roles.b": 2,
        "params.hidden": 32,
        "params.layers.count": 2,
        "params.total_steps": 7,
    }


def test_script_has_its_arguments_and_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    yaml = f"trainer: {{script: ['{tmp_path}/train.py', --lr, '0.1', --seed, '5', --api-key, hunter22]}}\n"
    found = parameters_of(tmp_path, yaml, "launch.num_ranks=2")
    words = found.pop("trainer.script")
    assert "hunter22" not in words
    assert found == {"launch.num_ranks": 2, "lr": "0.1", "seed": "5", "api_key": "***"}


SHIPPED = """
trainer: ddp
optim: {name: adam}
launch: {num_ranks: 2, env: {A: b}}
cluster: {partition: gpu}
notify: {command: /bin/true}
"""


def test_shipped_trainer_has_what_affects_results(tmp_path: Path) -> None:
    found = parameters_of(tmp_path, SHIPPED, "name=first", "experiment=digits")
    sections = {key.partition(".")[0] for key in found}
    assert sections == {"trainer", "model", "data", "optim", "schedule", "precision", "stop", "elastic", "seed"}
    assert (found["trainer.target"], found["optim.lr"]) == ("ddp", 0.001)
    assert "optim.momentum" not in found, "adam has none"


@pytest.mark.parametrize("yaml", [SHIPPED, OWN], ids=["shipped", "own"])
def test_keys_of_the_command_line_are_parameters(tmp_path: Path, yaml: str) -> None:
    """Also with the value of the YAML, as in one cell of a sweep, and those that a resume changes."""
    set_before = ["launch.num_ranks=2", "cluster.sbatch={nice: 5}"]
    found = parameters_of(tmp_path, yaml, *set_before, changed="tracking.log_every_steps=7")
    runtime = {key: value for key, value in found.items() if key.startswith(("launch", "cluster", "tracking"))}
    assert runtime == {"launch.num_ranks": 2, "cluster.sbatch.nice": "5", "tracking.log_every_steps": 7}


def test_arguments_named_like_sections_are_parameters(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = "--name, a, --launch.mode, b, --checkpoint, c"
    found = parameters_of(tmp_path, f"trainer: {{script: ['{tmp_path}/train.py', {words}]}}\n")
    assert {"name": "a", "launch.mode": "b", "checkpoint": "c"}.items() <= found.items()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train.py --lr 0.1 --epochs=90 -b 32", {"lr": "0.1", "epochs": "90", "b": "32"}),
        ("train.py --shift -1 --no-cuda --fp-16", {"shift": "-1", "no_cuda": "true", "fp_16": "true"}),
        ("main.py -a resnet18 --dummy --gpu 2 /data", {"a": "resnet18", "dummy": "true", "gpu": "2", "arg1": "/data"}),
        ("train.py model=gpt +optim.lr=1e-3 ++a/b=x=y", {"model": "gpt", "optim.lr": "1e-3", "a/b": "x=y"}),
        ("train.py --tag a --tag b --dry -- -", {"tag": "b", "dry": "true", "arg1": "-"}),
        ("-m package.train --lr 0.1 --empty=", {"lr": "0.1", "empty": ""}),
    ],
)  # fmt: skip
def test_arguments_of_a_script_by_name(command: str, expected: dict[str, str]) -> None:
    assert run_parameters.script_arguments(command.split()) == expected


# --- `secrets.json` of a run, readable by its owner only

VALUES = {"WANDB_API_KEY": "s3cret", "HPCDIST_PARAMS_X_KEY": "[1, 2]"}


@pytest.fixture
def empty(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "exp" / "first")


def test_file_is_private_with_any_umask(empty: RunDir) -> None:
    before = os.umask(0)
    try:
        kept_secrets.keep(empty, VALUES)
    finally:
        os.umask(before)
    assert empty.secrets.stat().st_mode & 0o777 == 0o600
    assert kept_secrets.kept(empty) == VALUES
    kept_secrets.keep(empty, {"A": "b"})
    assert kept_secrets.kept(empty) == {"A": "b"}
    assert sorted(path.name for path in empty.path.iterdir() if path.is_file()) == ["secrets.json", "state.json"]
    kept_secrets.keep(empty, {})
    assert not empty.secrets.exists()
    assert kept_secrets.kept(empty) == {}


@pytest.mark.parametrize("status", get_args(Status))
def test_file_is_removed_when_the_run_is_finished_or_cancelled(empty: RunDir, status: Status) -> None:
    kept_secrets.keep(empty, VALUES)
    empty.write_state(replace(empty.read_state(), status=status))
    assert empty.secrets.exists() == (status not in ("finished", "cancelled"))


def test_readable_damaged_or_special_secret_files_are_errors(empty: RunDir) -> None:
    kept_secrets.keep(empty, VALUES)
    empty.secrets.chmod(0o640)
    message = r"secrets\.json has mode 0640, .* replace them, then `chmod 600` the file"
    with pytest.raises(RunFolderError, match=message):
        kept_secrets.kept(empty)
    empty.secrets.chmod(0o600)
    for text in ("{", "[" * 100_000, '{"values": {"A": 1}}'):
        empty.secrets.write_text(text)
        with pytest.raises(RunFolderError, match=r"is damaged: remove it, and set its variables in the environment"):
            kept_secrets.kept(empty)
    empty.secrets.rename(empty.path / "elsewhere")
    empty.secrets.symlink_to("elsewhere")
    with pytest.raises(RunFolderError, match=r"secrets\.json cannot be read: Too many levels of symbolic links"):
        kept_secrets.kept(empty)
    empty.secrets.unlink()
    os.mkfifo(empty.secrets, 0o600)
    with pytest.raises(RunFolderError, match=r"secrets\.json is not a regular file: remove it"):
        kept_secrets.kept(empty)
    empty.secrets.unlink()
    kept_secrets.keep(empty, VALUES)
    if os.geteuid() == 0:
        os.chown(empty.secrets, 65534, 65534)
        assert kept_secrets.kept(empty) == {}, "of another user"


# --- Checkpoints by their names and manifests: copies, unfinished and damaged ones are not counted


@pytest.fixture
def stepped(tmp_path: Path) -> RunDir:
    """A run with checkpoints of the steps 9 and 100,000,000, and folders that are none."""
    stepped = RunDir.create(tmp_path / "runs" / "exp" / "first")
    for name, manifest in {
        "step-00000009": '{"step": 9}',
        "step-100000000": '{"step": 100000000}',
        "step-200000000": None,
        "step-100000000-copy-of-a-user": '{"step": 300000000}',
        ".tmp-step-00000400": '{"step": 400}',
    }.items():
        (stepped.checkpoints / name).mkdir(parents=True)
        if manifest is not None:
            (stepped.checkpoints / name / "manifest.json").write_text(manifest)
    return stepped


def test_copies_and_unfinished_checkpoints_are_not_counted(stepped: RunDir) -> None:
    assert [step for step, _ in checkpoint_files.complete_checkpoints(stepped)] == [9, 100_000_000]
    assert checkpoint_files.newest_step(stepped) == 100_000_000
    assert [facts.step for facts in read_checkpoints(stepped)] == [9, 100_000_000]
    assert newest_checkpoint_bytes(stepped) == len('{"step": 100000000}')
    (stepped.checkpoints / "step-100000000" / "manifest.json").write_text("{")
    assert checkpoint_files.newest_step(stepped) == 9
    (stepped.checkpoints / "step-00000009" / "manifest.json").unlink()
    assert checkpoint_files.newest_step(stepped) is None


def test_resume_point_names_the_step_or_file_and_lost_steps(stepped: RunDir, empty: RunDir) -> None:
    before = stepped.new_attempt()
    assert resume_text.resume_point(stepped, before) == "resuming at step 100000000"
    write_json(before.outcome(0), {"outcome": "failed", "step": 100_000_014})
    lost = "14 steps lost (100000001 to 100000014)"
    assert resume_text.resume_point(stepped, before) == f"resuming at step 100000000, {lost}"
    before = empty.new_attempt()
    write_json(before.outcome(0), {"outcome": "failed", "step": 1})
    assert (
        resume_text.resume_point(empty, before)
        == "starting at step 0, since there is no checkpoint, 1 step lost (step 1)"
    )
    assert resume_text.resume_point(empty, before, ["train.py"]) == (
        "starts train.py from the beginning, unless it has saved elsewhere"
    )
    (empty.checkpoints / "newest.pt").touch()
    assert resume_text.resume_point(empty, before, ["train.py"]) == (
        "starts train.py again, with its files in the run's checkpoints/"
    )


def test_stop_of_a_script_names_the_newest_file_that_exists(empty: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script, or its user, may delete a file after it was listed."""
    (empty.checkpoints / "kept.pt").touch()
    monkeypatch.setattr(resume_text, "script_files", lambda run: ["kept.pt", "deleted.pt"])
    text = resume_text.how_stopped(empty, empty.new_attempt(), ["train.py"], began=0.0)
    assert "saved checkpoints/kept.pt" in text


# --- Starts of all jobs of a run in `job.json`, completed from accounting.


ONE = AccountedStart(
    name="exp/first", began=1000.0, ended=1100.0, queue_s=5.0, nodes="n[1-2]", cores=4, gpus=0, energy_j=None,
    state="COMPLETED",
)  # fmt: skip


class Accounting:
    """Slurm's accounting: starts by job id, and the ids that were asked for."""

    def __init__(self) -> None:
        self.starts: dict[str, list[AccountedStart]] = {}
        self.asked: list[str] = []

    def accounted_starts(self, job_id: str) -> list[AccountedStart]:
        self.asked.append(job_id)
        if job_id not in self.starts:
            raise SlurmError("sacct: error: slurmdbd: Unable to connect")
        return self.starts[job_id]


@pytest.fixture
def accounting(monkeypatch: pytest.MonkeyPatch) -> Accounting:
    found = Accounting()
    monkeypatch.setattr(client, "accounted_starts", found.accounted_starts)
    return found


def submit(empty: RunDir, job_id: str, name: str = "exp/first") -> None:
    keep_job(empty)
    write_json(empty.path / "slurm.json", {"job_id": job_id, "job_name": name, "cluster": "c"})


def test_jobs_before_a_resume_are_completed_from_accounting(empty: RunDir, accounting: Accounting) -> None:
    submit(empty, "41")
    write_json(empty.path / "job.json", {"job_id": "41", "starts": {"0": {"nodes": "n[1-2]", "began": 1000.0}}})
    submit(empty, "42")  # which failed before its first attempt recorded a start
    submit(empty, "43")
    update_job_starts(empty)
    assert [start.ended for start in all_job_starts(empty)] == [None], "accounting does not answer"
    accounting.starts = {
        "41": [ONE],
        "42": [replace(ONE, began=1200.0, ended=1210.0, state="FAILED")],
        "43": [replace(ONE, began=1300.0, ended=1350.0)],
    }
    accounting.asked.clear()
    update_job_starts(empty)
    assert [(start.began, start.ended, start.cores) for start in all_job_starts(empty)] == [
        (1000.0, 1100.0, 4),
        (1200.0, 1210.0, 4),
        (1300.0, 1350.0, 4),
    ]
    assert sum((one.ended - one.began) * sum(one.nodes.values()) for one in allocations_of(empty)) == 160 * 4
    assert [start["began"] for start in job_starts(empty)] == [1300.0], "of the current job alone"
    assert sorted(accounting.asked) == ["41", "42", "43"]
    update_job_starts(empty)
    assert len(accounting.asked) == 3, "complete records are not queried again"


def test_another_job_with_an_earlier_id_is_not_counted(empty: RunDir, accounting: Accounting) -> None:
    """The ids of a cluster begin anew when it is set up again."""
    own = {"0": {"nodes": "n1", "began": 1000.0}}
    write_json(empty.path / "job.json", {"job_id": "7", "starts": own, "earlier": {"5": own, "6": own}})
    write_json(empty.path / "slurm.json", {"job_id": "8", "job_name": "exp/first"})
    accounting.starts = {
        "5": [replace(ONE, name="exp/other", began=5000.0, ended=5100.0)],
        "6": [replace(ONE, name="array/of-the-run", began=1001.0)],
        "7": [],
        "8": [replace(ONE, name="exp/other", began=6000.0)],
    }
    update_job_starts(empty)
    found = {(start.began, start.ended) for start in all_job_starts(empty)}
    assert found == {(1000.0, None), (1001.0, 1100.0)}


def test_a_job_that_may_have_started_again_is_queried_again(empty: RunDir, accounting: Accounting) -> None:
    submit(empty, "41")
    preempted = replace(ONE, state="PREEMPTED")
    accounting.starts = {"41": [preempted]}
    update_job_starts(empty)
    accounting.starts = {"41": [preempted, replace(ONE, began=1200.0, ended=1230.0, state="NODE_FAIL")]}
    update_job_starts(empty)
    accounting.starts["41"].append(replace(ONE, began=1300.0, ended=1400.0))
    update_job_starts(empty)
    update_job_starts(empty)
    assert [start.ended for start in all_job_starts(empty)] == [1100.0, 1230.0, 1400.0]
    assert len(accounting.asked) == 3


def test_job_of_a_rejected_submission_is_counted_once(empty: RunDir, accounting: Accounting) -> None:
    submit(empty, "41")
    accounting.starts = {"41": [ONE]}
    keep_job(empty)  # before a submission that Slurm rejects: the run still belongs to job 41
    update_job_starts(empty)
    assert [start.began for start in all_job_starts(empty)] == [1000.0]
    keep_job(empty)
    write_json(empty.path / "slurm.json", {"job_id": None})
    update_job_starts(empty)
    assert [start.began for start in all_job_starts(empty)] == [1000.0], "also while the next job has no id"
