"""From a config to its container, and every mistake about it in one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from supervisor_scene import Scene

import hpcdist
from hpcdist.config.schema import ClusterConfig, Config, ContainerConfig, DataConfig, LaunchConfig, TrainerConfig
from hpcdist.containers.image_probe import (
    check_image,
    check_image_on_nodes,
    image_digest,
    image_probe_command,
    image_probe_env,
    start_failure,
)
from hpcdist.containers.node_steps import ContainerSteps
from hpcdist.containers.rank_container import container_problems, make_mount_points, rank_container
from hpcdist.containers.spec import PASSED, ContainerSpec, Mount
from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.files.atomic import read_json
from hpcdist.machine.facts import source_digest
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir

IMAGE = "localhost/hpcdist:0.1.0"
SPEC = ContainerSpec(runtime="podman", image=IMAGE, run=Path("/runs/e/r"), mounts=(), workdir=Path("/p"))
GOOD = {
    "node": "n1",
    "hpcdist": hpcdist.__version__,
    "source": source_digest(str(Path(hpcdist.__file__).parent)),
    "python": "3.12.3",
    "torch": "2.15.0",
    "cuda": "13.2",
}


def line(**changes: Any) -> str:
    facts = {key: value for key, value in (GOOD | changes).items() if value is not None}
    return f"hpcdist-image {json.dumps(facts)}"


def test_the_digest_of_a_package_is_that_of_its_code(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text("a = 1\n")
    digest_before = source_digest(str(tmp_path))
    (tmp_path / "sub" / "notes.md").write_text("nothing that runs")
    assert source_digest(str(tmp_path)) == digest_before
    (tmp_path / "sub" / "a.py").rename(tmp_path / "sub" / "b.py")
    assert source_digest(str(tmp_path)) != digest_before


# --- the spec


def test_folders_are_mounted_where_they_are_and_ranks_see_what_the_config_names(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    run = RunDir(tmp_path / "runs/digits/first")
    config = Config(
        trainer=TrainerConfig(script=["/elsewhere/train.py"]),
        data=DataConfig(root=str(tmp_path / "data")),
        launch=LaunchConfig(env={"MY_FLAG": "1", "MY_TOKEN": "secret"}),
        cluster=ClusterConfig(gpus_per_node=4, env={"SITE": "x"}),
        container=ContainerConfig(
            runtime="apptainer",
            image="/i.sif",
            mounts=["/scratch:/fast:ro"],
            env=["WANDB_MODE"],
            extra_args=["--fakeroot"],
        ),
    )
    spec = rank_container(config, run, cwd=tmp_path / "project/sub", root=tmp_path / "project")
    assert spec == ContainerSpec(
        runtime="apptainer",
        image="/i.sif",
        run=run.path,
        mounts=(
            Mount(source="/elsewhere", target="/elsewhere"),
            Mount(source="/scratch", target="/fast", read_only=True),
            *(
                Mount(source=str(path), target=str(path))
                for path in (tmp_path / "data", tmp_path / "project", run.path)
            ),
        ),
        workdir=tmp_path / "project/sub",
        env=(*PASSED, "WANDB_MODE", "SITE", "MY_FLAG", "MY_TOKEN"),
        gpus="all",
        extra_args=("--fakeroot",),
    )


def test_no_runtime_no_box() -> None:
    assert rank_container(Config(), RunDir(Path("/runs/e/r")), cwd=Path("/p"), root=Path("/p")) is None


def test_a_folder_of_ones_own_takes_the_place_of_the_usual_one(tmp_path: Path) -> None:
    config = Config(
        data=DataConfig(root=str(tmp_path)),
        container=ContainerConfig(runtime="podman", image=IMAGE, mounts=[f"/scratch/copy:{tmp_path}:ro"]),
    )
    spec = rank_container(config, RunDir(Path("/runs/e/r")), cwd=Path("/p"), root=Path("/p"))
    assert spec is not None
    assert [mount.source for mount in spec.mounts if mount.target == str(tmp_path)] == ["/scratch/copy"]


def test_the_images_own_folders_are_not_hidden_by_where_someone_stands() -> None:
    spec = rank_container(
        config(runtime="podman", image=IMAGE), RunDir(Path("/runs/e/r")), cwd=Path("/usr"), root=Path("/")
    )
    assert spec is not None
    assert not {"/", "/usr"} & {mount.target for mount in spec.mounts}


@pytest.mark.parametrize(
    ("asked", "device", "gpus", "wanted"),
    [
        ("auto", "auto", 4, True),
        ("auto", "cpu", 4, False),
        ("auto", "auto", 0, False),
        ("all", "cpu", 0, True),
        ("none", "auto", 4, False),
    ],
)
def test_who_sees_gpus(asked: Any, device: Any, gpus: int, wanted: bool) -> None:
    config = Config(
        launch=LaunchConfig(device=device),
        cluster=ClusterConfig(gpus_per_node=gpus),
        container=ContainerConfig(runtime="podman", image=IMAGE, gpus=asked),
    )
    spec = rank_container(config, RunDir(Path("/runs/e/r")), cwd=Path("/p"), root=Path("/p"))
    assert spec is not None
    assert spec.gpus == ("all" if wanted else "")


# --- what an image says


@pytest.mark.processes
def test_the_look_tells_of_the_python_that_makes_it(tmp_path: Path) -> None:
    words = image_probe_command(replace(SPEC, runtime="charliecloud", python=sys.executable)).argv
    code = words[-1]
    assert words[-3:-1] == [sys.executable, "-c"]
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "SLURMD_NODENAME": "n7"}
    said = subprocess.check_output([sys.executable, "-c", code], env=env, text=True)
    facts, problem, _ = check_image(SPEC, said, "", "n7")
    assert problem == ""
    assert facts is not None
    torch_version = __import__("torch").__version__
    wanted = ("n7", hpcdist.__version__, torch_version, ".".join(map(str, sys.version_info[:3])))
    assert (facts["node"], facts["hpcdist"], facts["torch"], facts["python"]) == wanted


def test_the_look_sees_the_image_alone() -> None:
    spec = replace(SPEC, runtime="charliecloud", mounts=(Mount(source="/p", target="/p"),))
    assert not [word for word in image_probe_command(spec).argv if word.startswith("--bind")]
    assert image_probe_env(spec, {"PYTHONPATH": "/host", "NCCL_DEBUG": "INFO", "USER": "ada"}) == {
        "NCCL_DEBUG": "INFO",
        "USER": "ada",
    }


@pytest.mark.parametrize(
    ("output", "errors", "told"),
    [
        (line(hpcdist=None), "", f"{IMAGE} has no hpcdist for its python3: see container.python"),
        (
            line(source="0123456789ab"),
            "",
            f"{IMAGE} has hpcdist {hpcdist.__version__} from other source files than this one: build it again",
        ),
        (
            line(hpcdist="0.0.9"),
            "",
            f"{IMAGE} has hpcdist 0.0.9, this is {hpcdist.__version__}: build it again, or install 0.0.9",
        ),
        (line(python="3.9.2"), "", f"{IMAGE} has Python 3.9.2; hpcdist needs 3.11 or newer"),
        (
            line(driver="535.104.05"),
            "",
            f"{IMAGE} needs driver 580.65 or newer for its CUDA 13.2, found 535.104.05 on n2",
        ),
        ("", "hpcdist: podman is not installed on n2", "podman is not installed on n2"),
        ("", "Error: x: image not known", f"{IMAGE} is not on n2: Error: x: image not known"),
        (
            "",
            "exec container process `/usr/bin/python3`: Exec format error",
            f"{IMAGE} is for another processor architecture than n2 has ({os.uname().machine})",
        ),
        (
            "",
            'Error: exec: "python3": executable file not found in $PATH',
            f"{IMAGE} cannot be started on n2, or has no python3 in it:"
            ' Error: exec: "python3": executable file not found in $PATH',
        ),
    ],
)
def test_what_only_a_user_can_put_right(output: str, errors: str, told: str) -> None:
    _, problem, passing = check_image(replace(SPEC, gpus="all"), output, errors, "n2")
    assert (problem, passing) == (told, False)


@pytest.mark.parametrize("driver", ["580.65.06", "595.10", None])
def test_drivers_that_are_new_enough_or_not_there(driver: str | None) -> None:
    assert check_image(replace(SPEC, gpus="all"), line(driver=driver), "", "n1")[1] == ""
    assert check_image(SPEC, line(driver="400.1"), "", "n1")[1] == "", "no GPU is asked for"


def test_what_may_pass_by_itself() -> None:
    told = f"podman could not start {IMAGE} on n2: Error: no space left"
    assert check_image(SPEC, "", "srun: error: n2: task 1: Exited\nError: no space left\n", "n2") == (None, told, True)


def test_one_line_for_all_nodes() -> None:
    good, missing = f"0: {line()}\n", "hpcdist: podman is not installed on"
    assert check_image_on_nodes(SPEC, ["n1"], good, "")["hpcdist"] == hpcdist.__version__
    with pytest.raises(UserMistake) as caught:
        check_image_on_nodes(SPEC, ["n1", "n2", "n3"], good, f"1: {missing} n2\n2: {missing} n3\n")
    assert str(caught.value) == "podman is not installed on n2, n3"
    with pytest.raises(HpcdistError) as passing:
        check_image_on_nodes(SPEC, ["n1", "n2"], good, "")
    assert not isinstance(passing.value, UserMistake)
    assert str(passing.value) == f"podman could not start {IMAGE} on n2: it printed nothing"


def test_errors_of_pyxis_without_a_label_count_for_every_node() -> None:
    refused = 'srun: error: pyxis: --container-mounts: invalid format: "/a"\nsrun: error: Invalid --container-mounts'
    with pytest.raises(HpcdistError) as caught:
        check_image_on_nodes(replace(SPEC, runtime="pyxis"), ["n1", "n2"], "", refused)
    problem = f'pyxis could not start {IMAGE} on n1, n2: pyxis: --container-mounts: invalid format: "/a"'
    assert str(caught.value) == problem


def test_labels_of_many_tasks_are_as_wide_as_the_widest() -> None:
    nodes = [f"n{number}" for number in range(11)]
    output = "".join(f"{number:2d}: {line()}\n" for number in range(11))
    assert check_image_on_nodes(SPEC, nodes, output, "")["hpcdist"] == hpcdist.__version__


# --- before the queue


def config(**container: Any) -> Config:
    return Config(name="x", runs_dir="/runs", container=ContainerConfig(**container))


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    for name in ("usr", "dev"):
        (tmp_path / "image" / name).mkdir(parents=True)
    return tmp_path / "image"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("container", "told"),
    [
        (
            {"runtime": "podman", "image": "x", "mounts": ["/nowhere/data:/data"]},
            "container.mounts: /nowhere/data does not exist here; mount folders that only the nodes have by"
            " container.extra_args",
        ),
        ({"runtime": "apptainer", "image": "/no.sif"}, "container.image: no such file or folder: /no.sif"),
        (
            {"runtime": "apptainer", "image": "docker://hpcdist"},
            "container.image: docker://hpcdist would be fetched by every rank: convert it to a file first",
        ),
        (
            {"runtime": "charliecloud", "image": "/proc/self"},
            "container.image: /proc/self holds no root file system (no usr and dev in it)",
        ),
        ({"runtime": "enroot", "image": "/proc"}, "container.image: /proc is no file: enroot starts a .sqsh"),
    ],
)
def test_what_is_not_there(tmp_path: Path, container: dict[str, Any], told: str) -> None:
    assert container_problems(config(**container), tmp_path, {"PATH": ""}) == [told]


def podman(folder: Path, script: str) -> dict[str, str]:
    """An environment with a podman that does what the script says."""
    tool = folder / "podman"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.mark.processes
def test_an_image_that_is_not_in_the_store_here(tmp_path: Path) -> None:
    env = podman(tmp_path, 'echo "Error: inspecting object: $5: image not known" >&2; exit 125')
    told = (
        "container.image: localhost/typo is not in podman's store on this machine (inspecting object: localhost/typo:"
        " image not known): build or load it, or set container.check_image=false if only the nodes have it"
    )
    wanted = {"runtime": "podman", "image": "localhost/typo"}
    assert container_problems(config(**wanted), tmp_path, env) == [told]
    assert container_problems(config(**wanted, check_image=False), tmp_path, env) == []
    assert container_problems(config(**wanted), tmp_path, {"PATH": "/nowhere"}) == []


@pytest.mark.processes
def test_an_image_of_another_version_here(tmp_path: Path) -> None:
    env = podman(tmp_path, f"[ $1 = image ] || echo '{line(hpcdist='0.0.1')}'")
    (told,) = container_problems(config(runtime="podman", image=IMAGE), tmp_path, env)
    assert told.startswith(f"container.image: {IMAGE} has hpcdist 0.0.1, this is ")
    assert (
        container_problems(config(runtime="podman", image=IMAGE), tmp_path, podman(tmp_path, f"echo '{line()}'")) == []
    )


# --- the image's folder, its digest


def test_an_unpacked_image_gets_what_the_run_mounts_things_at(rootfs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    here = Path(__file__)
    there = Path("/srv/code")  # not below /tmp, which ch-run shows as it is
    mounts = (
        Mount(source=str(here.parent), target=str(there)),
        Mount(source=str(here), target="/etc/one.py"),
        Mount(source=str(tmp_path), target=str(tmp_path)),
    )
    spec = replace(SPEC, runtime="charliecloud", image=str(rootfs), mounts=mounts)
    make_mount_points(spec)
    make_mount_points(spec)
    assert (rootfs / str(there)[1:]).is_dir()
    assert [(rootfs / "etc" / name).is_file() for name in ("one.py", "hosts", "resolv.conf")] == [True] * 3
    assert (rootfs / "tmp").exists() == (not str(tmp_path).startswith("/tmp"))


def test_an_image_that_cannot_be_prepared(rootfs: Path) -> None:
    (rootfs / "data").touch()
    spec = replace(SPEC, runtime="charliecloud", image=str(rootfs), mounts=(Mount(source="/usr", target="/data/x"),))
    with pytest.raises(UserMistake, match="image has no mount point /data/x, and it cannot be created: Not a "):
        make_mount_points(spec)


@pytest.mark.processes
def test_digests(tmp_path: Path) -> None:
    env = podman(tmp_path, f"echo {'ab' * 32}")
    assert image_digest(SPEC, env) == f"sha256:{'ab' * 32}"
    assert image_digest(SPEC, {"PATH": "/nowhere"}) is None
    assert (
        image_digest(replace(SPEC, runtime="apptainer", image="/i/hpcdist-0.1.0-0123456789ab.sif"), {})
        == "sha256:0123456789ab"
    )
    assert image_digest(replace(SPEC, runtime="charliecloud", image="/i/mine"), {}) is None


# --- ranks that never came to be

#: Forms of pyxis' messages, after its source (0.24); progress is printed by srun, errors by slurmstepd.
PYXIS_PROGRESS = "pyxis: importing docker image: nvcr.io#a/b:1\npyxis: imported docker image: nvcr.io#a/b:1\n"
PYXIS_LOG = """\
slurmstepd: error: pyxis: child 77 failed with error code: 1
slurmstepd: error: pyxis: failed to create container filesystem
slurmstepd: error: pyxis: printing enroot log file:
slurmstepd: error: pyxis:     [ERROR] No such file
slurmstepd: error: pyxis: couldn't start container
slurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
slurmstepd: error: Failed to invoke spank plugin stack
"""


@pytest.mark.parametrize(
    ("runtime", "code", "log", "expected"),
    [
        (
            "podman",
            125,
            "x\nError: no space\n",
            ("podman could not start the container (exit code 125): Error: no space", True),
        ),
        ("docker", 127, "", ("docker could not start the container (exit code 127): it printed nothing", False)),
        ("podman", 126, "e", ("podman could not start the container (exit code 126): e", False)),
        ("podman", 1, "Error: mine", None),
        ("podman", 137, "Error: mine", None),
        (
            "charliecloud",
            1,
            "ch-run[7]: error: can't stat: /i",
            ("charliecloud could not start the container (exit code 1): ch-run[7]: error: can't stat: /i", True),
        ),
        ("charliecloud", 1, "ch-run[7]: warning\nValueError: x", None),
        ("apptainer", 255, "FATAL: no", ("apptainer could not start the container (exit code 255): FATAL: no", True)),
        ("charliecloud", -9, "ch-run[7]: x", None),
        (
            "apptainer",
            255,
            "ERROR  : could not open image /i.sif",
            ("apptainer could not start the container (exit code 255): ERROR : could not open image /i.sif", True),
        ),
        (
            "enroot",
            1,
            "enroot-mount: failed to mount: /nowhere: No such file or directory",
            (
                "enroot could not start the container (exit code 1): enroot-mount: failed to mount: /nowhere:"
                " No such file or directory",
                True,
            ),
        ),
        (
            "docker",
            125,
            "docker: Error response from daemon: no space\n\nRun 'docker run --help' for more information",
            (
                "docker could not start the container (exit code 125): docker: Error response from daemon: no space",
                True,
            ),
        ),
        (
            "pyxis",
            1,
            PYXIS_LOG,
            ("pyxis could not start the container (exit code 1): pyxis: [ERROR] No such file", True),
        ),
        ("pyxis", 1, f"{PYXIS_PROGRESS}ValueError: x\nslurmstepd: error: *** STEP 5.0 ON n1 CANCELLED ***\n", None),
        ("pyxis", 137, PYXIS_PROGRESS, None),
    ],
)
def test_failures_of_the_runtime_itself(runtime: str, code: int, log: str, expected: tuple[str, bool] | None) -> None:
    assert start_failure(runtime, code, log) == expected


def test_a_runtimes_failure_is_reported_in_the_ranks_place(tmp_path: Path) -> None:
    (tmp_path / "001").mkdir()
    attempt = Attempt(tmp_path / "001")
    steps = ContainerSteps(SPEC, RunDir(tmp_path), {})
    attempt.log(2).write_text("Error: no space\n")
    assert steps.exit_code(attempt, 2, "n1", 125) == 125
    assert {key: attempt.outcomes()[2][key] for key in ("outcome", "host", "error", "peer_lost")} == {
        "outcome": "failed",
        "host": "n1",
        "error": "podman could not start the container (exit code 125): Error: no space",
        "peer_lost": False,
    }
    assert steps.exit_code(attempt, 3, "n1", 127) == 127
    assert attempt.outcomes()[3]["outcome"] == "rejected"
    assert [steps.exit_code(attempt, 1, "n1", code) for code in (137, 143, 1, 0, -15, 255)] == [-9, -15, 1, 0, -15, 255]
    assert sorted(attempt.outcomes()) == [2, 3]


class Scripted:
    """srun and podman on a PATH, in place of a job."""

    def __init__(self, folder: Path, srun: str) -> None:
        self.log = folder / "calls"
        for name, script in (("srun", srun), ("podman", f"echo {'ab' * 32}")):
            tool = folder / name
            tool.write_text(f'#!/bin/sh\necho {name} "$@" >> {self.log}\n{script}\n')
            tool.chmod(0o755)
        self.env = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-2]", "PYTHONPATH": "/host"}

    def calls(self) -> list[str]:
        return [text for text in self.log.read_text().splitlines() if text.startswith(("srun", "podman"))]


@pytest.mark.processes
def test_nodes_are_cleaned_for_each_attempt_and_looked_at_once(tmp_path: Path) -> None:
    here = Scripted(tmp_path, f"case $* in *label*-c*) echo '0: {line()}'; echo '1: {line()}';; esac")
    run = RunDir(tmp_path)
    steps = ContainerSteps(SPEC, run, here.env)
    env_before = os.environ.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", here.env["PATH"])
        steps.prepare()
        steps.prepare()
    assert os.environ == env_before
    steps_made = [call.split()[:8] for call in here.calls() if call.startswith("srun")]
    assert len(steps_made) == 3, "two clean, one looks"
    common = "srun --overlap --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=1 --input=none"
    common += " --job-name=hpcdist-containers"
    assert steps_made == [common.split()] * 3
    assert "remove podman hpcdist.run=/runs/e/r" in here.calls()[0]
    assert read_json(run.container) == {
        "runtime": "podman",
        "image": IMAGE,
        "image_digest": f"sha256:{'ab' * 32}",
        "hpcdist": hpcdist.__version__,
        "python": "3.12.3",
        "torch": "2.15.0",
        "cuda": "13.2",
    }


@pytest.mark.processes
def test_each_component_of_a_job_has_steps_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Scripted(tmp_path, f"case $* in *label*-c*) echo '0: {line()}'; echo '1: {line()}';; esac")
    monkeypatch.setenv("PATH", here.env["PATH"])
    groups = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]"}
    spec = replace(SPEC, gpus="all")
    ContainerSteps(spec, RunDir(tmp_path), here.env | groups | {"SLURM_HET_SIZE": "2"}, het=True).prepare()
    calls = [call for call in here.calls() if call.startswith("srun")]
    wanted = ["--het-group=0 --overlap --nodes=1 --ntasks=1", "--het-group=1 --overlap --nodes=2 --ntasks=2"]
    assert [call.removeprefix("srun ").partition(" --ntasks-per-node")[0] for call in calls] == [*wanted, *wanted]
    assert "gpu" not in "".join(calls), "not every component has any"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("said", "is_told"),
    [
        ("srun: error: Slurm job 12 has expired", False),
        ("srun: error: Unable to confirm allocation for job 4: Job is pending execution", False),
        ("Error: no space", True),
    ],
)
def test_what_is_left_is_told_unless_the_job_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, said: str, is_told: bool
) -> None:
    here = Scripted(tmp_path, f"echo '{said}' >&2; exit 1")
    monkeypatch.setenv("PATH", here.env["PATH"])
    ContainerSteps(SPEC, RunDir(tmp_path), here.env).remove_containers()
    assert (f"containers may remain on a node: {said}" in caplog.text) == is_told


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    run = RunDir.create(tmp_path / "runs" / "digits" / "first")
    run.config.write_text("{}\n")
    return Scene(run)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("error", "rejected", "attempts"),
    [(UserMistake("podman is not installed on n2"), True, 1), (HpcdistError("n2 said nothing"), False, 2)],
)
def test_ranks_that_cannot_be_started_end_the_run_with_that_line(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: HpcdistError, rejected: bool, attempts: int
) -> None:
    supervisor = scene.supervisor()

    def refuse(attempt: Attempt) -> Any:
        raise error

    monkeypatch.setattr(scene.launcher, "start", refuse)
    state = scene.supervise(supervisor)
    twice = "" if rejected else ", twice in a row: another restart would not help"
    assert (state.status, state.rejected, state.attempt) == ("failed", rejected, attempts)
    assert state.reason == f"{error}{twice}"


def test_the_script_comes_with_the_package() -> None:
    assert shutil.which("sh")
    assert (Path(hpcdist.__file__).parent / "containers" / "node_wrapper.sh").is_file()
