"""`hpcdist run` and `hpcdist resume`."""

import json
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, Make, Seen, SetJob, job, one_line
from fake_nvml import gpu, install_fake_nvml
from hpcdist_runs import hide_torch

from hpcdist import __version__
from hpcdist.config.loading import load_config
from hpcdist.containers.local_container import without_secrets
from hpcdist.errors import UserMistake
from hpcdist.host.json_files import write_json
from hpcdist.run import create
from hpcdist.run.folder import State
from hpcdist.run.kept_secrets import kept
from hpcdist.run.lease import hold
from hpcdist.supervisor import local_launcher

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

# --- `hpcdist run`, and the hidden commands that it starts


def test_dry_run_shows_no_secrets_and_writes_nothing(hpcdist: Cli, tmp_path: Path) -> None:
    result = hpcdist("run", "ddp_digits", "name=first", "launch.env.API_KEY=s3cret", "--dry-run")
    assert (result.code, result.err) == (0, "")
    assert "API_KEY=***" in result.out
    assert "s3cret" not in result.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sweep", [(), ("--sweep", "seed=1,2")], ids=["run", "sweep"])
def test_unusable_code_is_rejected_before_anything_is_written(
    hpcdist: Cli, supervised: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweep: tuple[str, ...]
) -> None:
    code = tmp_path / "train.py"
    code.write_text("def train(ctx, cfg):\n    if ctx\n")
    message = one_line(hpcdist("run", "ddp_digits", "trainer=train:train", "name=first", *sweep))
    assert "trainer.target: " in message
    assert "train.py:2: SyntaxError: expected ':' in `if ctx`" in message
    hide_torch(monkeypatch)
    assert one_line(hpcdist("run", "ddp_digits", "name=first", *sweep)) == (
        f"trainer.target=ddp needs torch, which {sys.executable} does not have: run `pip install '.[train]'`"
        " in a checkout of hpcdist"
    )
    assert list(tmp_path.iterdir()) == [code]


@pytest.mark.parametrize("words", [(), ("--dry-run",), ("--sweep", "seed=1,2")], ids=["run", "dry run", "sweep"])
def test_missing_weights_are_an_error_before_anything_is_written(
    hpcdist: Cli, supervised: Seen, tmp_path: Path, words: tuple[str, ...]
) -> None:
    message = one_line(hpcdist("run", "ddp_digits", "name=first", "model.init_from=old.pth", *words))
    assert message == f"model.init_from: {tmp_path}/old.pth cannot be read: No such file or directory"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("supervised", "cells")
def test_run_has_a_copy_of_the_weights_it_starts_from(hpcdist: Cli, tmp_path: Path) -> None:
    (tmp_path / "old.pth").write_bytes(b"\x80\x02 a file of an old torch")
    for name, words in (("first", ()), ("second", ("--sweep", "seed=1,2"))):
        result = hpcdist("run", "rl_cartpole", f"name={name}", "model.init_from=./old.pth", *words)
        assert "without effect" not in result.err + result.out
    copies = sorted((tmp_path / "runs").rglob("init_from/weights.pt"))
    assert [copy.read_bytes() for copy in copies] == [(tmp_path / "old.pth").read_bytes()] * 3
    note = "note: without effect: model.init_from, since the trainer comm does not read them"
    assert note in hpcdist("run", "bench_comm", "name=third", "model.init_from=./old.pth").out


def test_run_prints_the_plan_and_ends_with_the_status(hpcdist: Cli, supervised: Seen, tmp_path: Path) -> None:
    supervised["ends"] = State(status="failed", reason="a reason")
    result = hpcdist("run", "ddp_digits", "name=first", "launch.num_ranks=3")
    assert (result.code, result.out.splitlines()[-1]) == (1, "failed: a reason")
    assert result.out.startswith("trainer")
    assert supervised["run"].path == tmp_path / "runs" / "digits" / "first"
    assert (supervised["plan"].num_ranks, supervised["config"].launch.num_ranks) == (3, 3)


# --- `hpcdist resume`


def test_detached_resume_prints_where_it_continues(
    hpcdist: Cli, make: Make, supervised: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_launcher, "detach", lambda run, env: 4711)
    run = make("first", status="failed", attempt=1)
    (run.checkpoints / "step-00000190").mkdir(parents=True)
    (run.checkpoints / "step-00000190" / "manifest.json").write_text("{}")
    write_json(run.attempt(1).outcome(0), {"outcome": "failed", "step": 204})
    result = hpcdist("resume", "first", "--detach")
    assert "resuming at step 190, 14 steps lost (191 to 204)\n" in result.out


def test_resume_rejects_held_and_queued_runs(hpcdist: Cli, make: Make, supervised: Seen, slurm: SetJob) -> None:
    run = make("first", status="running", attempt=1)
    before = run.config.read_text()
    with hold(run):
        message = one_line(hpcdist("resume", "first", "seed=9"))
    assert message.startswith(f"run first is held by process {os.getpid()} of ")
    write_json(run.path / "slurm.json", {"job_id": "7"})
    run.write_state(State(status="queued"))
    slurm(job("PENDING"))
    message = one_line(hpcdist("resume", "first", "seed=9"))
    assert message == "run first is queued and cannot be resumed: `hpcdist follow first`"
    assert run.config.read_text() == before
    assert "run" not in supervised


def test_current_code_that_cannot_run_does_not_replace_the_copy(hpcdist: Cli, make: Make, tmp_path: Path) -> None:
    code = tmp_path / "train.py"
    code.write_text("old")
    run = make("first", "trainer=train:train", status="failed", attempt=1)
    code.write_text("print(\n")
    message = one_line(hpcdist("resume", "first", "--with-current-code"))
    assert message.startswith(f"trainer.target: {code}:1: SyntaxError: '(' was never closed in `print(`")
    assert (run.code / "train.py").read_text() == "old"


def test_resume_after_the_end_requires_the_secrets_again(
    hpcdist: Cli, make: Make, supervised: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make("first", "launch.env.API_KEY=s3cret", status="failed", attempt=1)
    assert hpcdist("resume", "first").code == 0
    assert supervised["config"].launch.env == {"API_KEY": "s3cret"}
    run.write_state(replace(run.read_state(), status="cancelled"))
    assert not run.secrets.exists()
    assert "launch.env.API_KEY was redacted when the run was written: set API_KEY in the environment" in one_line(
        hpcdist("resume", "first")
    )
    monkeypatch.setenv("API_KEY", "s3cret")
    assert hpcdist("resume", "first").code == 0
    assert supervised["config"].launch.env == {"API_KEY": "s3cret"}
    assert "s3cret" not in run.config.read_text()
    monkeypatch.setenv("API_KEY", "another")
    assert hpcdist("resume", "first").code == 0
    assert supervised["config"].launch.env == {"API_KEY": "another"}
    assert kept(run) == {"API_KEY": "another"}


# --- `hpcdist image`, `hpcdist run --in` and `hpcdist run --resume`, with a fake podman in PATH

IMAGE: list[dict[str, Any]] = [
    {
        "Id": "ab" * 32,
        "Architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
        "Config": {
            "Labels": {"org.opencontainers.image.title": "hpcdist", "org.opencontainers.image.version": __version__}
        },
    }
]


@pytest.fixture
def podman(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Put a fake podman alone in PATH. It has one image; its `run` records the arguments and exits with 7."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "image.json").write_text(json.dumps(IMAGE))
    (folder / "podman").write_text(
        "#!/bin/sh\n"
        f'case "$1 $2 $3" in --version*) ;; "image inspect hpcdist") /bin/cat {folder}/image.json;;\n'
        f'run*) for word; do echo "$word" >> {folder}/words; done; exit 7;;\n'
        '*) echo "image not known" >&2; exit 125;; esac\n'
    )
    (folder / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_podman_command_is_printed_without_secrets(hpcdist: Cli, podman: Path, tmp_path: Path) -> None:
    code, output, _ = hpcdist(
        "run", "ddp_digits", "seed=3", "tracking.tags.api_token=hidden", "--in", "podman", "--new"
    )
    assert code == 7
    words = (podman / "words").read_text().splitlines()
    (line,) = [line for line in output.splitlines() if line.startswith("podman run")]
    secret = "tracking.tags.api_token="
    assert shlex.split(line)[1:] == [f"{secret}***" if word.startswith(secret) else word for word in words]
    assert words[-5:] == ["run", "ddp_digits", "seed=3", f"{secret}${{oc.env:HPCDIST_OVERRIDE_1}}", "--new"]
    assert "--env=HPCDIST_OVERRIDE_1" in words
    assert "hidden" not in output + " ".join(words)
    assert (tmp_path / "runs").is_dir()
    assert "no GPU is visible: training on CPUs" in output


def test_script_runs_in_podman(hpcdist: Cli, podman: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    script = tmp_path_factory.mktemp("elsewhere") / "train.py"
    script.touch()
    code, output, _ = hpcdist("run", "--in", "podman", "--dry-run", "seed=3", str(script), "--lr", "0.10", "--dry-run")
    assert code == 0
    words = shlex.split(output.splitlines()[-1])
    command = f'trainer.script=["{script}", "--lr", "0.10", "--dry-run"]'
    assert words[-5:] == ["run", "plain_script", "experiment=train", "seed=3", command]
    assert any(word.endswith(f"{script.parent}:{script.parent}") for word in words), "it is mounted"


def test_dry_run_in_podman_needs_no_image(hpcdist: Cli, podman: Path, tmp_path: Path) -> None:
    code, output, errors = hpcdist("run", "ddp_digits", "--in", "podman", "--image", "absent", "--dry-run")
    assert code == 0
    assert output.splitlines()[-1].startswith("podman run --rm")
    assert "--env=HPCDIST_IMAGE_DIGEST= " in output
    assert list(tmp_path.iterdir()) == []
    assert errors.startswith("hpcdist: podman has no image 'absent': `hpcdist image build` makes one here")
    assert errors.count("\n") == 1
    code, _, errors = hpcdist("run", "ddp_digits", "--in", "podman", "--image", "absent")
    assert (code, errors.startswith("hpcdist: podman has no image 'absent'")) == (2, True)


def test_user_config_is_mounted_at_the_same_path(hpcdist: Cli, podman: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    own = tmp_path / "elsewhere" / "mine.yaml"
    own.write_text("runs_dir: ~/mine\n")
    (tmp_path / "here").mkdir()
    os.chdir(tmp_path / "here")
    code, output, _ = hpcdist("run", str(own), "--in", "podman", "--dry-run")
    assert code == 0
    words = shlex.split(output.splitlines()[-1])
    mounted = [word.removeprefix("--volume=") for word in words if word.startswith("--volume=")]
    assert f"{own.parent}:{own.parent}" in mounted
    assert f"{tmp_path}/here:{tmp_path}/here" in mounted
    assert words[-3:] == ["run", str(own), f"runs_dir={Path.home()}/mine"]


def test_weights_are_mounted_once_beside_a_config(hpcdist: Cli, podman: Path, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "c.yaml").write_text("trainer: ddp\n")
    for name in ("mine/old.pth", "old.pth"):
        (tmp_path / name).touch()

    def mounted(*words: str) -> list[str]:
        code, output, errors = hpcdist("run", *words, "--in", "podman", "--dry-run")
        assert code == 0, errors
        volumes = [word for word in shlex.split(output.splitlines()[-1]) if word.startswith("--volume=")]
        return [path for path in re.findall("--volume=([^:]*)", " ".join(volumes)) if path.startswith(f"{tmp_path}/")]

    runs = f"{tmp_path}/runs"
    assert mounted("ddp_digits", "model.init_from=./old.pth") == [f"{tmp_path}/old.pth", runs], "cwd is not mounted"
    assert mounted("ddp_digits", "model.init_from=./missing.pth") == [runs], "podman would create a folder"
    for folder in ("blobs", "snapshot"):
        (tmp_path / folder).mkdir()
    (tmp_path / "blobs" / "1").write_text("{}")
    (tmp_path / "snapshot" / "config.json").symlink_to("../blobs/1")
    expected = [f"{tmp_path}/blobs", runs, f"{tmp_path}/snapshot"]
    assert mounted("ddp_digits", "model.init_from=./snapshot") == expected, "the links lead to files"
    (tmp_path / "here").mkdir()
    os.chdir(tmp_path / "here")
    config = str(tmp_path / "mine" / "c.yaml")
    expected = [f"{tmp_path}/here", f"{tmp_path}/mine"]
    assert mounted(config, f"model.init_from={tmp_path}/mine/old.pth") == expected


def test_old_driver_is_rejected_before_the_start(
    hpcdist: Cli, podman: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    labels = {**IMAGE[0]["Config"]["Labels"], "hpcdist.cuda": "13.2"}
    (podman / "image.json").write_text(json.dumps([{**IMAGE[0], "Config": {"Labels": labels}}]))
    install_fake_nvml(monkeypatch, gpu("NVIDIA H200"), driver="550.54")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    code, _, errors = hpcdist("run", "ddp_digits", "--in", "podman")
    assert code == 2
    assert "needs driver 580.65 or newer for its CUDA 13.2, found 550.54 here" in errors
    assert list(tmp_path.iterdir()) == []


def test_secret_override_is_passed_in_the_environment() -> None:
    overrides = ["seed=1", "launch.env.A_KEY='1234'", "launch.env.B_KEY=${oc.env:B_KEY}", "tracking.uri=http://u:p@h"]
    words, variables = without_secrets(overrides)
    assert words == [
        "seed=1",
        "launch.env.A_KEY=${oc.env:HPCDIST_OVERRIDE_1}",
        "launch.env.B_KEY=${oc.env:B_KEY}",
        "tracking.uri=${oc.env:HPCDIST_OVERRIDE_3}",
    ]
    assert variables == {"HPCDIST_OVERRIDE_1": "1234", "HPCDIST_OVERRIDE_3": "http://u:p@h"}
    with pytest.raises(UserMistake, match=r"^launch\.env holds a secret, .* such as launch\.env\.NAME=…$"):
        without_secrets(["launch.env={A_KEY: abc}"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "ddp_digits", "--in", "slurm"), "--in must be docker or podman, got 'slurm'"),
        (("run", "ddp_digits", "--in", "docker"), "docker is not installed: choose podman instead, which works here"),
        (("run", "ddp_digits", "--in", "podman", "--detach"), "--detach and --in exclude each other"),
        (("image", "build", "--target", "tiny"), "Invalid value for '--target': 'tiny' is not one of "),
        (("image", "check", "x"), "podman has no image 'x'"),
        (("image", "convert", "--to", "zip"), "Invalid value for '--to': 'zip' is not one of 'sqsh', "),
        (("image", "convert", "--to", "sqsh"), "enroot is not installed here"),
    ],
)
def test_a_user_error_is_one_line(hpcdist: Cli, podman: Path, arguments: tuple[str, ...], message: str) -> None:
    code, _, errors = hpcdist(*arguments)
    assert code == 2
    assert errors.startswith(f"hpcdist: {message}")
    assert errors.count("\n") == 1


# --- run --resume


@pytest.mark.parametrize(
    ("flag", "variable", "resumes"), [("", "", False), ("--resume", "", True), ("", "1", True), ("--new", "1", False)]
)
def test_run_resumes_a_stopped_run_on_request(
    hpcdist: Cli, supervised: Seen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    flag: str, variable: str, resumes: bool,
) -> None:  # fmt: skip
    monkeypatch.setenv("HPCDIST_RESUME", variable)
    run = create.create_run(replace(load_config("ddp_digits", []), name="first"), tmp_path)
    run.write_state(replace(run.read_state(), status="stopped"))
    code, output, _ = hpcdist("run", "ddp_digits", *flag.split())
    assert code == 0
    assert (supervised["run"].name == "first") is resumes
    assert supervised["config"].name == supervised["run"].name
    assert ("continuing run first, which has the same config" in output) is resumes


# --- `hpcdist run train.py --lr 0.1`: a script and its arguments instead of a config, or after it


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


def test_words_after_a_script_belong_to_it(hpcdist: Cli, script: Path, supervised: Seen) -> None:
    words = ["--lr", "0.10", "--amp", "no", "--code", "010", "--detach", "--help", "seed=3", "größe", "--", "other.py"]
    result = hpcdist("run", "launch.num_ranks=3", "train.py", *words)
    assert (result.code, result.err) == (0, "")
    config = supervised["config"]
    assert config.trainer.script == [str(script), *words]
    assert (config.launch.num_ranks, config.experiment, config.seed) == (3, "train", 0)
    assert config.name.startswith("train-20")


STARTS_RANKS = """\
import torch.distributed as dist
import torch.multiprocessing as mp
def run(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
mp.spawn(run, nprocs=2)
"""


def test_script_that_starts_its_own_ranks_is_started_once(hpcdist: Cli, script: Path, supervised: Seen) -> None:
    script.write_text(STARTS_RANKS)
    sentence = "train.py starts its own ranks (torch.multiprocessing.spawn in train.py:5)"
    result = hpcdist("run", "name=first", "train.py")
    assert (result.code, supervised["plan"].num_ranks) == (0, 1)
    assert f"{sentence}: hpcdist starts it once" in result.out
    refusal = hpcdist("run", "launch.num_ranks=2", "train.py")
    assert (refusal.code, refusal.err.startswith(f"hpcdist: launch.num_ranks=2, but {sentence}: ")) == (2, True)
    script.write_text("print('hello')\n")
    refusal = hpcdist("resume", "first", "launch.num_ranks=2")
    assert refusal.code == 2, "the run has a copy of the code"
    assert hpcdist("run", "--like", "first", "launch.num_ranks=2").code == 2
    result = hpcdist("resume", "first", "launch.num_ranks=2", "--with-current-code")
    assert (result.code, supervised["plan"].num_ranks) == (0, 2)


def test_keys_precede_a_script(hpcdist: Cli, script: Path, supervised: Seen) -> None:
    config = script.with_name("mine.yaml")
    config.write_text("{seed: 4, experiment: mine, params: {file: x.py}}")
    result = hpcdist("run", "mine.yaml", "tracking.uri=sqlite:///a.db", "name=x.py", "./train.py")
    assert (result.code, result.err) == (0, "")
    found = supervised["config"]
    assert found.trainer.script == [str(script)]
    assert (found.seed, found.experiment, found.name) == (4, "mine", "x.py")
    assert found.tracking.uri == f"sqlite:///{script.parent}/a.db"
    assert hpcdist("run", "experiment=second", "train.py").code == 0
    assert supervised["config"].experiment == "second"


def test_module_instead_of_a_script(
    hpcdist: Cli, tmp_path: Path, supervised: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/train.py").touch()
    result = hpcdist("run", "-m", "package.train", "-m", "x")
    assert (result.code, result.err) == (0, "")
    config = supervised["config"]
    assert (config.trainer.script, config.experiment) == (["-m", "package.train", "-m", "x"], "package.train")
    (tmp_path / "package/train.py").write_text("def broken(:\n")
    result = hpcdist("run", "-m", "package.train")
    assert (result.code, "SyntaxError" in result.err) == (2, True)
    assert hpcdist("run", "-m").err.startswith("hpcdist: command line: trainer.script needs a module after -m, as in")
    assert hpcdist("run", "-m", "nopackage.train").err.startswith("hpcdist: trainer.script: no module 'nopackage' in ")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as in the command, which pytest is not
    assert one_line(hpcdist("run", "-m", "__main__")).startswith("trainer.script: no module '__main__' in ")


@pytest.mark.parametrize(
    "words", [("run",), ("submit", "--dry-run"), ("run", "--sweep", "seed=1,2"), ("run", "ddp_digits")]
)
def test_program_that_is_no_python_is_refused(hpcdist: Cli, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "x.ipynb").write_text('{"cells": []}')
    (tmp_path / "train.sh").write_text("python train.py\n")
    assert one_line(hpcdist(*words, "x.ipynb")).removeprefix("--sweep: ") == (
        "trainer.script: x.ipynb is a notebook, and ranks run Python files:"
        f" `jupyter nbconvert --to script {tmp_path}/x.ipynb` writes one"
    )
    assert "trainer.script: train.sh is a shell script" in one_line(hpcdist(*words, "train.sh", "--lr", "1"))
    assert sorted(os.listdir()) == ["train.sh", "x.ipynb"]


def test_sweep_of_a_script(hpcdist: Cli, script: Path) -> None:
    assert one_line(hpcdist("run", "nope.py", "--lr", "1")) == f"trainer.script: no such file: {script.parent}/nope.py"
    message = one_line(hpcdist("run", "trian.py"))
    assert message == f"trainer.script: no such file: {script.parent}/trian.py: did you mean 'train.py'?"
    result = hpcdist("run", "--dry-run", "--sweep", "params.lr=0.1,0.2", "train.py", "--lr", "${params.lr}")
    assert (result.code, result.err) == (0, "")
    assert "lr=0.2" in result.out
    assert f"{script} --lr 0.1" in result.out, "of the first cell"
