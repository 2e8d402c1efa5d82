"""`hpcdist image`, `hpcdist run --in` and `hpcdist run --resume`, with a fake podman in PATH."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

from hpcdist import __version__
from hpcdist.config.loading import load_config
from hpcdist.containers.steps import without_secrets
from hpcdist.errors import UserMistake
from hpcdist.run import create
from tests.support.fake_nvml import gpu, install_fake_nvml

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

IMAGE: list[dict[str, Any]] = [
    {
        "Id": "ab" * 32,
        "Architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
        "Config": {
            "Labels": {
                "org.opencontainers.image.title": "hpcdist",
                "org.opencontainers.image.version": __version__,
            }
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


def test_run_in_podman_prints_the_command_and_returns_its_exit_code(hpcdist: Cli, podman: Path, tmp_path: Path) -> None:
    code, output, _ = hpcdist("run", "ddp_digits", "seed=3", "--in", "podman", "--new")
    assert code == 7
    (line,) = [line for line in output.splitlines() if line.startswith("podman run")]
    assert shlex.split(line)[1:] == (podman / "words").read_text().splitlines()
    assert line.endswith(" hpcdist run ddp_digits seed=3 --new")
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


def test_dry_run_in_podman_writes_nothing(hpcdist: Cli, podman: Path, tmp_path: Path) -> None:
    code, output, _ = hpcdist("run", "ddp_digits", "--in", "podman", "--dry-run")
    assert code == 0
    assert output.splitlines()[-1].startswith("podman run --rm")
    assert list(tmp_path.iterdir()) == []


def test_dry_run_in_podman_needs_no_image(hpcdist: Cli, podman: Path, tmp_path: Path) -> None:
    code, output, errors = hpcdist("run", "ddp_digits", "--in", "podman", "--image", "absent", "--dry-run")
    assert code == 0
    assert output.splitlines()[-1].startswith("podman run --rm")
    assert "--env=HPCDIST_IMAGE_DIGEST= " in output
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


def test_secret_override_is_not_printed(hpcdist: Cli, podman: Path) -> None:
    _, output, _ = hpcdist("run", "ddp_digits", "seed=1", "tracking.tags.api_token=hidden", "--in", "podman")
    assert "hidden" not in output
    words = (podman / "words").read_text()
    assert "hidden" not in words
    assert "--env=HPCDIST_OVERRIDE_1\n" in words
    assert "tracking.tags.api_token=${oc.env:HPCDIST_OVERRIDE_1}\n" in words


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
        (("run", "ddp_digits", "--in", "docker"), "no container engine to use here: docker is not installed"),
        (("run", "ddp_digits", "--in", "podman", "--image", "x"), "podman has no image 'x': `hpcdist image build`"),
        (("run", "ddp_digits", "--in", "podman", "--detach"), "--detach and --in exclude each other"),
        (("image", "build", "--target", "tiny"), "--target must be one of default, slim, mlflow, got 'tiny'"),
        (("image", "check", "x"), "podman has no image 'x'"),
        (("image", "convert", "--to", "zip"), "--to must be one of sqsh, sif, dir, got 'zip'"),
        (("image", "convert", "--to", "sqsh"), "enroot is not installed here"),
    ],
)
def test_a_user_error_is_one_line(hpcdist: Cli, podman: Path, arguments: tuple[str, ...], message: str) -> None:
    code, _, errors = hpcdist(*arguments)
    assert code == 2
    assert errors.startswith(f"hpcdist: {message}")
    assert errors.count("\n") == 1


def test_image_build_prints_its_command(hpcdist: Cli, podman: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = Path(__file__).resolve().parents[3]
    monkeypatch.chdir(checkout)
    code, output, _ = hpcdist("image", "build", "--target", "slim", "--base", "debian:12", "--dry-run")
    assert code == 0
    assert output.startswith(
        f"podman build --format docker --file {checkout}/docker/Dockerfile --tag hpcdist:slim --target slim"
        " --build-arg BASE_IMAGE=debian:12"
    )


# --- run --resume


@pytest.mark.parametrize(
    ("flags", "env", "resumes"),
    [
        ((), {}, False),
        (("--resume",), {}, True),
        ((), {"HPCDIST_RESUME": "1"}, True),
        (("--new",), {"HPCDIST_RESUME": "1"}, False),
    ],
)
def test_run_resumes_a_stopped_run_on_request(
    hpcdist: Cli,
    supervised: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: tuple[str, ...],
    env: dict[str, str],
    resumes: bool,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    run = create.create_run(replace(load_config("ddp_digits", []), name="first"), tmp_path)
    run.write_state(replace(run.read_state(), status="stopped"))
    code, output, _ = hpcdist("run", "ddp_digits", *flags)
    assert code == 0
    assert (supervised["run"].name == "first") is resumes
    assert supervised["config"].name == supervised["run"].name
    assert ("continuing run first, which has the same config" in output) is resumes
