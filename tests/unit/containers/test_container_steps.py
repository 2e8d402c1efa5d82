"""The containers of ranks, the steps of their job, the start of an image, and errors of runtimes."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from containers import SPEC
from slurm_recordings import FakeCommands

import hpcdist
from hpcdist.config.launch_schema import ClusterConfig, ContainerConfig, LaunchConfig
from hpcdist.config.schema import Config, DataConfig, TrainerConfig
from hpcdist.containers.spec import PASSED, ContainerSpec, Mount
from hpcdist.containers.steps import (
    DIGEST_BYTES,
    ContainerSteps,
    check_image_on_nodes,
    container_problems,
    image_digest,
    image_probe,
    make_mount_points,
    probe_outcome,
    rank_container,
    start_failure,
)
from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.host.files import read_json
from hpcdist.host.machine import source_digest
from hpcdist.run.folder import Attempt, RunDir

IMAGE = SPEC.image
FACTS = {
    "node": "n1",
    "hpcdist": hpcdist.__version__,
    "source": source_digest(str(Path(hpcdist.__file__).parent)),
    "python": "3.12.3",
    "torch": "2.15.0",
    "cuda": "13.2",
}


def probe_output(**changes: Any) -> str:
    """Return the line that the probe prints in an image; None removes a fact."""
    facts = {key: value for key, value in (FACTS | changes).items() if value is not None}
    return f"hpcdist-image {json.dumps(facts)}"


#: Messages of pyxis, from its source (0.24); srun prints progress, slurmstepd prints errors.
PYXIS_PROGRESS = "pyxis: importing docker image: nvcr.io#a/b:1\npyxis: imported docker image: nvcr.io#a/b:1\n"
PYXIS_LOG = """\
slurmstepd: error: pyxis: child 77 failed with error code: 1
slurmstepd: error: pyxis: failed to create container filesystem
slurmstepd: error: pyxis: printing enroot log file:
slurmstepd: error: pyxis:     [ERROR] No such file
slurmstepd: error: pyxis: couldn't start container
slurmstepd: error: Failed to invoke spank plugin stack
"""
#: Logs of tasks with pyxis 0.24 on Slurm 22.05, of several slurmds on one machine.
PYXIS_MOUNT_LOG = """\
slurmstepd-n1: error: pyxis: --container-mounts: source path does not exist: /nowhere
slurmstepd-n1: error: pyxis: printing enroot log file:
slurmstepd-n1: error: pyxis:     [INFO] Extracting squashfs filesystem...
slurmstepd-n1: error: pyxis: container was not started successfully by another task
slurmstepd-n1: error: Failed to invoke spank plugin stack
"""
PYXIS_CORRUPT_LOG = """\
slurmstepd-n2: error: pyxis: child 990 failed with error code: 1
slurmstepd-n2: error: pyxis: printing enroot log file:
slurmstepd-n2: error: pyxis:     [INFO] Extracting squashfs filesystem...
slurmstepd-n2: error: pyxis:     FATAL ERROR: File system corruption detected
slurmstepd-n2: error: *** STEP 3.0 ON n2 CANCELLED AT 2026-11-22T16:08:09 ***
slurmstepd-n2: error: pyxis: child 1033 failed with error code: 1
"""
#: The image has device files, which an ordinary user cannot unpack.
PYXIS_DEVICES_LOG = """\
slurmstepd: error: pyxis: child 990 failed with error code: 2
slurmstepd: error: pyxis: printing enroot log file:
slurmstepd: error: pyxis:     create_inode: could not create character device /d/dev/null, because you're not superuser!
slurmstepd: error: pyxis:     created 2 hardlinks
slurmstepd: error: Failed to invoke spank plugin stack
"""
PYXIS_OTHER_TASK_LOG = """\
slurmstepd-n2: error: pyxis: container was not started successfully by another task
slurmstepd-n2: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
slurmstepd-n2: error: Failed to invoke spank plugin stack
"""


# --- The Slurm steps that check images and remove containers


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    (tmp_path / "001").mkdir()
    return Attempt(tmp_path / "001")


def test_container_of_pyxis_that_slurm_interrupts_is_no_failure_of_the_rank(attempt: Attempt, tmp_path: Path) -> None:
    steps = ContainerSteps(replace(SPEC, runtime="pyxis"), RunDir(tmp_path), {})
    ended = "child 77 failed with error code: 1"
    attempt.log(0).write_text(PYXIS_LOG.replace(ended, f"child 77 terminated with signal {int(signal.SIGUSR2)}"))
    attempt.log(1).write_text(PYXIS_LOG)
    for rank in (0, 1):
        steps.exit_code(attempt, rank, "n1", 1)
    assert [attempt.outcomes()[rank]["interrupted"] for rank in (0, 1)] == [True, False]
    # With proctrack/cgroup the signal ends the task itself, and no message is printed.
    assert steps.exit_code(attempt, 2, "n1", -signal.SIGUSR2) == -signal.SIGUSR2
    assert attempt.outcomes()[2]["interrupted"]
    assert attempt.outcomes()[2]["error"] == "pyxis was interrupted by SIGUSR2 while it created the container"
    # Nor is a container that another task has not started.
    for rank, log in ((3, PYXIS_OTHER_TASK_LOG), (4, PYXIS_CORRUPT_LOG)):
        attempt.log(rank).write_text(log)
        steps.exit_code(attempt, rank, "n2", 1)
    assert [attempt.outcomes()[rank]["peer_lost"] for rank in (3, 4)] == [True, False]


def test_start_failure_is_written_as_the_outcome_of_the_rank(attempt: Attempt, tmp_path: Path) -> None:
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


def test_files_of_killed_wrappers_are_removed(attempt: Attempt, tmp_path: Path) -> None:
    os.mkfifo(attempt.path / "rank-00000.line")
    (attempt.path / "rank-00001.exit").write_text("137\n")
    attempt.log(1).write_text("stays")
    ContainerSteps(replace(SPEC, runtime="apptainer"), RunDir(tmp_path), {}).clean_up(attempt, failed=True)
    assert [path.name for path in attempt.path.iterdir()] == ["rank-00001.log"]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    """An srun on whose two nodes the image is complete, and a podman that has it; nothing else is on PATH."""
    (tmp_path / "bin").mkdir()
    found = FakeCommands(tmp_path / "bin")
    found.add_script("srun", f"case $* in *label*-c*) echo '0: {probe_output()}'; echo '1: {probe_output()}';; esac")
    found.add_script("podman", f"echo {'ab' * 32}")
    monkeypatch.setenv("PATH", f"{found.folder}:/usr/bin:/bin")
    return found


def job_env(tools: FakeCommands, **more: str) -> dict[str, str]:
    return {"PATH": f"{tools.folder}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-2]", "PYTHONPATH": "/host", **more}


@pytest.mark.processes
def test_each_attempt_removes_containers_and_the_first_checks_the_image(tools: FakeCommands, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    steps = ContainerSteps(SPEC, run, job_env(tools))
    steps.prepare(lambda: None)
    steps.prepare(lambda: None)
    started = [call for call in tools.calls() if call.startswith("srun")]
    assert len(started) == 3, "two remove containers, one checks the image"
    common = "srun --job-name=hpcdist-containers --overlap --nodes=2 --ntasks=2 --ntasks-per-node=1"
    assert all(call.startswith(f"{common} --cpus-per-task=1 --input=none") for call in started)
    assert "remove podman hpcdist.run=/runs/e/r" in started[0]
    assert read_json(run.container) == {
        "runtime": "podman",
        "image": IMAGE,
        "image_digest": f"sha256:{'ab' * 32}",
        **{key: FACTS[key] for key in ("hpcdist", "python", "torch", "cuda")},
    }


@pytest.mark.processes
def test_containers_of_pyxis_are_removed_after_a_killed_supervisor_or_a_failed_step(
    tools: FakeCommands, tmp_path: Path
) -> None:
    steps = ContainerSteps(replace(SPEC, runtime="pyxis"), RunDir(tmp_path), job_env(tools, SLURM_JOB_ID="7"))

    def num_removals() -> int:
        return sum(" remove pyxis 7" in call for call in tools.calls())

    steps.prepare(lambda: None)
    assert num_removals() == 1, "an earlier supervisor may have been killed"
    steps.remove_containers()
    steps.prepare(lambda: None)
    assert num_removals() == 1, "pyxis removes the containers of a step that ends by itself"
    steps.clean_up(Attempt(tmp_path / "001"), failed=True)
    assert num_removals() == 2
    steps.prepare(lambda: None)
    assert num_removals() == 3, "SIGKILL to a step that has not ended also ends pyxis' removal"


@pytest.mark.processes
def test_remaining_containers_are_logged_unless_the_job_is_over(
    tools: FakeCommands, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for error in ("srun: error: Slurm job 12 has expired", "Error: no space"):
        tools.add_script("srun", f"echo '{error}' >&2; exit 1")
        ContainerSteps(SPEC, RunDir(tmp_path), job_env(tools)).remove_containers()
    assert caplog.messages == ["containers may remain on a node: Error: no space"]


# --- The containers of ranks: specification and checks before submission


def test_specification_has_folders_variables_and_gpus_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    run = RunDir(tmp_path / "runs/digits/first")
    config = Config(
        trainer=TrainerConfig(script=["/code/train.py"]),
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
            Mount(source="/code", target="/code"),
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


def spec_of(config: Config, cwd: str = "/p", root: str = "/p") -> ContainerSpec:
    spec = rank_container(config, RunDir(Path("/runs/e/r")), cwd=Path(cwd), root=Path(root))
    assert spec is not None
    return spec


def test_configured_mount_replaces_the_default_one_and_system_folders_are_never_mounted(tmp_path: Path) -> None:
    config = Config(
        data=DataConfig(root=str(tmp_path)),
        container=ContainerConfig(runtime="podman", image=IMAGE, mounts=[f"/scratch/copy:{tmp_path}:ro"]),
    )
    mounts = {mount.target: mount.source for mount in spec_of(config, "/usr", "/").mounts}
    assert mounts[str(tmp_path)] == "/scratch/copy"
    assert not {"/", "/usr"} & mounts.keys()


def test_gpus_depend_on_device_and_request() -> None:
    for device, gpus, expected in (("auto", 4, "all"), ("cpu", 4, ""), ("auto", 0, "")):
        config = Config(
            launch=LaunchConfig(device=cast(Any, device)),
            cluster=ClusterConfig(gpus_per_node=gpus),
            container=ContainerConfig(runtime="podman", image=IMAGE),
        )
        assert spec_of(config).gpus == expected


# --- checks before submission
def config(**container: Any) -> Config:
    return Config(name="x", runs_dir="/runs", container=ContainerConfig(**container))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("runtime", "image", "problem"),
    [
        ("pyxis", "/no.sqsh", "no such file or folder: /no.sqsh"),
        ("pyxis", "/proc/self", "/proc/self is a folder, and pyxis needs a .sqsh file or an image reference"),
        ("apptainer", "docker://hpcdist",
         "docker://hpcdist would be fetched by every rank: convert it to a file first"),
        ("charliecloud", "/proc/self", "/proc/self holds no root file system (no usr and dev in it)"),
        *(("pyxis", image, None) for image in ("ada@registry.site:5000#team/hpcdist:0.1.0", str(Path(__file__)))),
    ],
)  # fmt: skip
def test_images_that_a_runtime_cannot_start_are_reported(
    tmp_path: Path, runtime: str, image: str, problem: str | None
) -> None:
    expected = [] if problem is None else [f"container.image: {problem.format(image=image)}"]
    assert container_problems(config(runtime=runtime, image=image), tmp_path, {"PATH": ""}) == expected


@pytest.mark.processes
def test_missing_mount_is_reported(tmp_path: Path) -> None:
    own = config(runtime="podman", image="x", mounts=["/nowhere/data:/data"])
    assert container_problems(own, tmp_path, {"PATH": ""}) == [
        "container.mounts: /nowhere/data does not exist here; mount folders that only the nodes have by"
        " container.extra_args"
    ]


@pytest.mark.processes
def test_image_of_the_local_store_is_checked(tools: FakeCommands, tmp_path: Path) -> None:
    env = job_env(tools)
    tools.add_script("podman", 'echo "Error: inspecting object: $5: image not known" >&2; exit 125')
    problem = (
        "container.image: localhost/typo is not in podman's store on this machine (inspecting object: localhost/typo:"
        " image not known): build or load it, or set container.check_image=false if only the nodes have it"
    )
    container = {"runtime": "podman", "image": "localhost/typo"}
    assert container_problems(config(**container), tmp_path, env) == [problem]
    assert container_problems(config(**container, check_image=False), tmp_path, env) == []
    assert container_problems(config(**container), tmp_path, {"PATH": "/nowhere"}) == []
    tools.add_script("podman", f"[ $1 = image ] || echo '{probe_output(hpcdist='0.0.1')}'")
    (problem,) = container_problems(config(**container), tmp_path, env)
    assert problem.startswith("container.image: localhost/typo has hpcdist 0.0.1, this is ")
    tools.add_script("podman", f"echo '{probe_output()}'")
    assert container_problems(config(**container), tmp_path, env) == []


# --- mount points and digests
@pytest.mark.processes
def test_mount_points_are_created_in_an_unpacked_image(tmp_path: Path) -> None:
    rootfs, file = tmp_path / "image", Path(__file__)
    for name in ("usr", "dev"):
        (rootfs / name).mkdir(parents=True)
    mounts = (
        Mount(source=str(file.parent), target="/srv/code"),  # not below /tmp, which ch-run shares with the host
        Mount(source=str(file), target="/etc/one.py"),
        Mount(source=str(tmp_path), target=str(tmp_path)),
    )
    spec = replace(SPEC, runtime="charliecloud", image=str(rootfs), mounts=mounts)
    make_mount_points(spec)
    make_mount_points(spec)
    assert (rootfs / "srv/code").is_dir()
    assert [(rootfs / "etc" / name).is_file() for name in ("one.py", "hosts", "resolv.conf")] == [True] * 3
    assert (rootfs / "tmp").exists() == (not str(tmp_path).startswith("/tmp"))
    # A submission creates them, too.
    container = {"runtime": "charliecloud", "image": str(rootfs), "check_image": False}
    assert container_problems(config(**container, mounts=["/usr:/data/x"]), tmp_path, {"PATH": ""}) == []
    assert (rootfs / "data/x").is_dir()
    (problem,) = container_problems(config(**container, mounts=["/usr:/etc/one.py/x"]), tmp_path, {"PATH": ""})
    assert re.search(
        r"image has no mount point /etc/one\.py/x, and it cannot be created \(Not a .*\): ask the owner", problem
    )


# --- The start of an image to read its versions, and errors of runtimes


@pytest.mark.processes
def test_probe_reports_the_versions_of_its_python(tmp_path: Path) -> None:
    command = image_probe(replace(SPEC, runtime="charliecloud", python=sys.executable), {})[0].argv
    code = command[-1]
    assert command[-3:-1] == [sys.executable, "-c"]
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "SLURMD_NODENAME": "n7"}
    output = subprocess.check_output([sys.executable, "-c", code], env=env, text=True)
    facts, problem, _ = probe_outcome(SPEC, output, "", "n7")
    assert problem == ""
    assert facts is not None
    torch_version = __import__("torch").__version__
    expected = ("n7", hpcdist.__version__, torch_version, ".".join(map(str, sys.version_info[:3])))
    assert (facts["node"], facts["hpcdist"], facts["torch"], facts["python"]) == expected


def test_probe_has_neither_mounts_nor_pythonpath() -> None:
    spec = replace(SPEC, runtime="charliecloud", mounts=(Mount(source="/p", target="/p"),))
    command, env = image_probe(spec, {"PYTHONPATH": "/host", "NCCL_DEBUG": "INFO", "USER": "ada"})
    assert not [word for word in command.argv if word.startswith("--bind")]
    assert env == {"NCCL_DEBUG": "INFO", "USER": "ada"}


INVALID = f"{IMAGE} gives no valid description of its Python on n2: "


@pytest.mark.parametrize(
    ("output", "errors", "message"),
    [
        ("hpcdist-image {]}", "", INVALID),
        (probe_output(python="3.x"), "", INVALID),
        (probe_output(hpcdist=None), "", f"{IMAGE} has no hpcdist for its python3: see container.python"),
        (probe_output(source="0123456789ab"), "",
         f"{IMAGE} has hpcdist {hpcdist.__version__} from other source files than this one: build it again"),
        (probe_output(hpcdist="0.0.9"), "",
         f"{IMAGE} has hpcdist 0.0.9, this is {hpcdist.__version__}: build it again, or install 0.0.9"),
        (probe_output(python="3.9.2"), "", f"{IMAGE} has Python 3.9.2; hpcdist needs 3.11 or newer"),
        (probe_output(driver="535.104.05"), "",
         f"{IMAGE} needs driver 580.65 or newer for its CUDA 13.2, found 535.104.05 on n2"),
        ("", "hpcdist: podman is not installed on n2", "podman is not installed on n2"),
        ("", "Error: x: image not known", f"{IMAGE} is not on n2: Error: x: image not known"),
        ("", "exec container process `/usr/bin/python3`: Exec format error",
         f"{IMAGE} is for another processor architecture than n2 has ({os.uname().machine})"),
        ("", 'Error: exec: "python3": executable file not found in $PATH',
         f"{IMAGE} cannot be started on n2, or has no python3 in it:"
         ' Error: exec: "python3": executable file not found in $PATH'),
    ],
)  # fmt: skip
def test_problems_that_need_the_user_are_not_retried(output: str, errors: str, message: str) -> None:
    _, problem, may_pass = probe_outcome(replace(SPEC, gpus="all"), output, errors, "n2")
    assert problem == message or (message == INVALID and problem.startswith(message))
    assert not may_pass


ON_NODES = "docs/how-to/containers.md lists what the runtime needs on each node"


# The texts of docker 20.10 and 28, and of apptainer 1.4, as printed on Debian.
@pytest.mark.parametrize(
    ("runtime", "errors", "fix"),
    [
        ("docker", "docker: Error response from daemon: failed to create shim task: OCI runtime create failed: error"
         " setting rlimit type 8: operation not permitted: unknown.", ON_NODES),
        ("docker", "docker: permission denied while trying to connect to the Docker daemon socket at"
         " unix:///run/docker.sock\n\nRun 'docker run --help' for more information", ON_NODES),
        ("apptainer", "FATAL:   squashfuse_ll exited: fuse: failed to open /dev/fuse: Permission denied", ON_NODES),
        ("enroot", "mkdir: cannot create directory '/run/enroot': Permission denied", ON_NODES),
        ("enroot", "Usage: enroot start NAME|IMAGE\n\nStart a container\n --uts  Run it", "see container.extra_args"),
    ],
)  # fmt: skip
def test_errors_that_no_retry_solves_have_a_fix(runtime: str, errors: str, fix: str) -> None:
    _, problem, may_pass = probe_outcome(replace(SPEC, runtime=runtime), "", errors, "n2")
    first = " ".join(errors.splitlines()[0].split())
    assert problem.startswith(f"{runtime} could not start {IMAGE} on n2: {first}: {fix}")
    assert not may_pass


def test_new_drivers_are_accepted_and_other_failures_retried() -> None:
    for driver in ("580.65.06", None):
        assert probe_outcome(replace(SPEC, gpus="all"), probe_output(driver=driver), "", "n1")[1] == ""
    assert probe_outcome(SPEC, probe_output(driver="400.1"), "", "n1")[1] == "", "the ranks use no GPU"
    outcome = probe_outcome(SPEC, "", "srun: error: n2: task 1: Exited\nError: no space left\n", "n2")
    assert outcome == (None, f"podman could not start {IMAGE} on n2: Error: no space left", True)


def test_equal_problems_of_nodes_are_merged() -> None:
    passed, missing = f"0: {probe_output()}\n", "hpcdist: podman is not installed on"
    assert check_image_on_nodes(SPEC, ["n1"], passed, "")["hpcdist"] == hpcdist.__version__
    with pytest.raises(UserMistake) as raised:
        check_image_on_nodes(SPEC, ["n1", "n2", "n3"], passed, f"1: {missing} n2\n2: {missing} n3\n")
    assert str(raised.value) == "podman is not installed on n2, n3"
    with pytest.raises(HpcdistError) as temporary:
        check_image_on_nodes(SPEC, ["n1", "n2"], passed, "")
    assert not isinstance(temporary.value, UserMistake)
    assert str(temporary.value) == f"podman could not start {IMAGE} on n2: it printed nothing"
    # Errors of pyxis without a label apply to all nodes.
    errors = 'srun: error: pyxis: --container-mounts: invalid format: "/a"\nsrun: error: Invalid --container-mounts'
    problem = f'pyxis could not start {IMAGE} on n1, n2: pyxis: --container-mounts: invalid format: "/a"'
    with pytest.raises(HpcdistError, match=re.escape(problem)):
        check_image_on_nodes(replace(SPEC, runtime="pyxis"), ["n1", "n2"], "", errors)


@pytest.mark.processes
def test_digest_comes_from_the_store_or_the_file_name(tools: FakeCommands, tmp_path: Path) -> None:
    assert image_digest(SPEC, job_env(tools)) == f"sha256:{'ab' * 32}"
    assert image_digest(SPEC, {"PATH": "/nowhere"}) is None
    named = replace(SPEC, runtime="apptainer", image="/i/hpcdist-0.1.0-0123456789ab.sif")
    assert image_digest(named, {}) == "sha256:0123456789ab"
    assert image_digest(replace(SPEC, runtime="charliecloud", image="/i/mine"), {}) is None
    assert image_digest(replace(SPEC, runtime="charliecloud", image=str(tmp_path)), {}) is None
    # The size, the start and the end of a file count.
    file, middle = tmp_path / "mine.sif", bytes(3 * DIGEST_BYTES)
    digests = set()
    for content in (middle, b"1" + middle[1:], middle[1:] + b"1", middle[1:], b"short"):
        file.write_bytes(content)
        digests.add(str(image_digest(replace(SPEC, runtime="apptainer", image=str(file)), {})))
    assert len(digests) == 5
    assert all(re.fullmatch("ends-sha256:[0-9a-f]{64}", digest) for digest in digests)


# --- The errors of runtimes that cannot start a container


@pytest.mark.parametrize(
    ("runtime", "code", "log"),
    [
        ("podman", 137, "Error: mine"),
        ("charliecloud", 1, "ch-run[7]: warning\nValueError: x"),
        ("charliecloud", -9, "ch-run[7]: x"),
        ("apptainer", 1, "WARNING: passwd file doesn't exist in container, not updating\nValueError: x\n"),
        ("enroot", 1, "ValueError: x\nmkdir: cannot create directory '/data': Permission denied"),
        ("pyxis", 1, f"{PYXIS_PROGRESS}ValueError: x\nslurmstepd: error: *** STEP 5.0 ON n1 CANCELLED ***\n"),
    ],
)
def test_failures_of_the_rank_are_not_those_of_the_runtime(runtime: str, code: int, log: str) -> None:
    assert start_failure(runtime, code, log) is None


NO_FUSE = "[WARN] Something went wrong trying to read the squashfs image.\n[ERROR] Failed to mount: /i.sqsh"
FAILED_MOUNT = (
    "\x1b[31mFATAL:  \x1b[0m container creation failed: mount /nowhere error\nINFO:    Cleaning up image...\n"
)
CANCELED = (
    'docker: Error response from daemon: error mounting "/nowhere" to rootfs: no such file or directory.\n'
    'time="2026-11-22T15:36:48Z" level=error msg="error waiting for container: context canceled"\n'
)
UNKNOWN_FLAG = 'Error for command "exec": unknown flag: --frob'
CAPABILITIES = "Requesting capability set 0x1ff while permitted capability set is 0x1fe"


@pytest.mark.parametrize(
    ("runtime", "code", "log", "error", "fix"),
    [
        ("podman", 125, "x\nError: no space\n", "Error: no space", ""),
        ("charliecloud", 1, "ch-run[7]: error: can't stat: /i", "ch-run[7]: error: can't stat: /i", ""),
        ("apptainer", 255, FAILED_MOUNT, "FATAL: container creation failed: mount /nowhere error", ""),
        ("enroot", 1, NO_FUSE, " ".join(NO_FUSE.splitlines()), ""),
        ("docker", 125, CANCELED, CANCELED.splitlines()[0], ""),
        ("pyxis", 1, PYXIS_LOG, "pyxis: [ERROR] No such file", ""),
        ("pyxis", 2, "slurmstepd-n1: error: execve(): sh: No such file\n", "execve(): sh: No such file", ""),
        ("pyxis", 1, PYXIS_MOUNT_LOG, "pyxis: --container-mounts: source path does not exist: /nowhere", ""),
        ("pyxis", 1, PYXIS_CORRUPT_LOG, "pyxis: FATAL ERROR: File system corruption detected", ""),
        ("docker", 127, "", "it printed nothing", None),
        ("podman", 126, "e", "e", None),
        ("apptainer", 1, f"\x1b[91mERROR  : {CAPABILITIES}\n\x1b[0m", f"ERROR : {CAPABILITIES}", f": {ON_NODES}"),
        ("apptainer", 1, f"{UNKNOWN_FLAG}\n\nOptions for exec:\n  -u, --userns\n", UNKNOWN_FLAG, ": see contain"),
        ("docker", 125, "unknown flag: --frob\n\nUsage:  docker run\n", "unknown flag: --frob", ": see contain"),
        ("pyxis", 1, PYXIS_DEVICES_LOG,
         "pyxis: create_inode: could not create character device /d/dev/null, because you're not superuser!",
         f": {ON_NODES}"),
        ("pyxis", 1, "slurmstepd: error: pyxis: child 7 failed with error code: 1\n"
         "slurmstepd: error: pyxis:     [ERROR] Invalid image reference: docker://Site/image:1\n",
         "pyxis: [ERROR] Invalid image reference: docker://Site/image:1", ": write container.image as "),
    ],
)  # fmt: skip
def test_failures_of_the_runtime_name_the_reason_and_the_fix_if_no_retry_helps(
    runtime: str, code: int, log: str, error: str, fix: str | None
) -> None:
    found = start_failure(runtime, code, log)
    assert found is not None
    text = f"{runtime} could not start the container (exit code {code}): {error}"
    assert found[0].startswith(f"{text}{fix}") if fix else found[0] == text
    assert found[1] == (fix == "")
