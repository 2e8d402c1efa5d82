"""The probe of an image: versions inside, problems of nodes, digests, and the errors of runtimes."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from container_logs import (
    PYXIS_CORRUPT_LOG,
    PYXIS_DEVICES_LOG,
    PYXIS_LOG,
    PYXIS_MOUNT_LOG,
    PYXIS_PROGRESS,
    SPEC,
    probe_output,
)
from slurm_recordings import FakeCommands

import hpcdist
from hpcdist.config.cluster_schema import ContainerConfig
from hpcdist.config.schema import Config
from hpcdist.containers.mounts import Mount
from hpcdist.containers.probe import (
    DIGEST_BYTES,
    check_image_on_nodes,
    image_digest,
    image_probe,
    image_problems,
    probe_outcome,
    start_failure,
)
from hpcdist.errors import HpcdistError, UserMistake

IMAGE = SPEC.image


@pytest.mark.processes
def test_probe_reports_the_versions_of_its_python() -> None:
    *_, option, code = image_probe(SPEC, {})[0]
    assert option == "-c"
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.check_output([sys.executable, "-c", code], env=env, text=True)
    facts, problem, _ = probe_outcome(SPEC, output, "", "n7")
    assert problem == ""
    assert facts is not None
    torch_version = __import__("torch").__version__
    expected = (hpcdist.__version__, torch_version, ".".join(map(str, sys.version_info[:3])))
    assert (facts["hpcdist"], facts["torch"], facts["python"]) == expected


def test_probe_has_neither_mounts_nor_pythonpath() -> None:
    spec = replace(SPEC, mounts=(Mount(source="/p", target="/p"),))
    command, env = image_probe(spec, {"PYTHONPATH": "/host", "NCCL_DEBUG": "INFO"})
    assert not [word for word in command if word.startswith("--bind")]
    assert env == {"NCCL_DEBUG": "INFO", "PYTHONNOUSERSITE": "1"}


@pytest.mark.processes
def test_image_is_started_once_before_a_submission(tmp_path: Path) -> None:
    tools = FakeCommands(tmp_path)
    config = Config(name="x", runs_dir="/runs", container=ContainerConfig(runtime="apptainer", image=IMAGE))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    tools.add_script("apptainer", f"echo '{probe_output(hpcdist='0.0.1')}'")
    (problem,) = image_problems(config, tmp_path, env)
    assert problem.startswith(f"container.image: {IMAGE} has hpcdist 0.0.1, this is ")
    tools.add_script("apptainer", f"echo '{probe_output()}'")
    assert image_problems(config, tmp_path, env) == []
    assert image_problems(config, tmp_path, {"PATH": "/nowhere"}) == [], "this machine cannot start it"


INVALID = f"{IMAGE} gives no valid description of its Python on n2: "


@pytest.mark.parametrize(
    ("output", "errors", "message"),
    [
        ("hpcdist-versions {]}", "", INVALID),
        (probe_output(python="3.x"), "", INVALID),
        (probe_output(hpcdist=None), "",
         f"{IMAGE} has no hpcdist for its python3: install hpcdist {hpcdist.__version__} in the image"),
        (probe_output(source="0123456789ab"), "",
         f"{IMAGE} has hpcdist {hpcdist.__version__} from other source files than this one: build it again"),
        (probe_output(hpcdist="0.0.9"), "",
         f"{IMAGE} has hpcdist 0.0.9, this is {hpcdist.__version__}: build it again, or install 0.0.9"),
        (probe_output(python="3.9.2"), "", f"{IMAGE} has Python 3.9.2; hpcdist needs 3.11 or newer"),
        (probe_output(driver="535.104.05"), "",
         f"{IMAGE} needs driver 580.65 or newer for its CUDA 13.2, found 535.104.05 on n2"),
        ("", "hpcdist: apptainer is not installed on n2", "apptainer is not installed on n2"),
        ("", "/.singularity.d/actions/exec: /usr/bin/python3: Exec format error",
         f"{IMAGE} is for another processor architecture than n2 has ({os.uname().machine})"),
        ("", "FATAL:   image targets 'arm64', cannot run on 'amd64'",
         f"{IMAGE} is for another processor architecture than n2 has ({os.uname().machine})"),
        ("", 'FATAL:   "python3": executable file not found in $PATH',
         f"{IMAGE} cannot be started on n2, or has no python3 in it:"
         ' FATAL: "python3": executable file not found in $PATH'),
    ],
)  # fmt: skip
def test_problems_that_need_the_user_are_not_retried(output: str, errors: str, message: str) -> None:
    _, problem, may_pass = probe_outcome(replace(SPEC, uses_gpus=True), output, errors, "n2")
    assert problem == message or (message == INVALID and problem.startswith(message))
    assert not may_pass


ON_NODES = "docs/how-to/containers.md lists the requirements of the runtime on each node"


# The texts of apptainer 1.4 and enroot 4.1, as printed on Debian.
@pytest.mark.parametrize(
    ("runtime", "errors", "fix"),
    [
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
        assert probe_outcome(replace(SPEC, uses_gpus=True), probe_output(driver=driver), "", "n1")[1] == ""
    assert probe_outcome(SPEC, probe_output(driver="400.1"), "", "n1")[1] == "", "the ranks use no GPU"
    outcome = probe_outcome(SPEC, "", "srun: error: n2: task 1: Exited\nFATAL:   no space left\n", "n2")
    assert outcome == (None, f"apptainer could not start {IMAGE} on n2: FATAL: no space left", True)


def test_equal_problems_of_nodes_are_merged() -> None:
    passed, missing = f"0: {probe_output()}\n", "hpcdist: apptainer is not installed on"
    assert check_image_on_nodes(SPEC, ["n1"], passed, "")["hpcdist"] == hpcdist.__version__
    with pytest.raises(UserMistake) as raised:
        check_image_on_nodes(SPEC, ["n1", "n2", "n3"], passed, f"1: {missing} n2\n2: {missing} n3\n")
    assert str(raised.value) == "apptainer is not installed on n2, n3"
    with pytest.raises(HpcdistError) as temporary:
        check_image_on_nodes(SPEC, ["n1", "n2"], passed, "")
    assert not isinstance(temporary.value, UserMistake)
    assert str(temporary.value) == f"apptainer could not start {IMAGE} on n2: it printed nothing"
    # Errors of pyxis without a label apply to all nodes.
    errors = 'srun: error: pyxis: --container-mounts: invalid format: "/a"\nsrun: error: Invalid --container-mounts'
    problem = f'pyxis could not start {IMAGE} on n1, n2: pyxis: --container-mounts: invalid format: "/a"'
    with pytest.raises(HpcdistError, match=re.escape(problem)):
        check_image_on_nodes(replace(SPEC, runtime="pyxis"), ["n1", "n2"], "", errors)


def test_digest_comes_from_the_file_name_or_parts_of_the_file(tmp_path: Path) -> None:
    assert image_digest(replace(SPEC, image="/i/hpcdist-0.1.0-0123456789ab.sif")) == "sha256:0123456789ab"
    assert image_digest(replace(SPEC, image="/i/mine")) is None
    assert image_digest(replace(SPEC, image=str(tmp_path))) is None
    # The size, the start and the end of a file count.
    file, middle = tmp_path / "mine.sif", bytes(3 * DIGEST_BYTES)
    digests = set()
    for content in (middle, b"1" + middle[1:], middle[1:] + b"1", middle[1:], b"short"):
        file.write_bytes(content)
        digests.add(str(image_digest(replace(SPEC, image=str(file)))))
    assert len(digests) == 5
    assert all(re.fullmatch("ends-sha256:[0-9a-f]{64}", digest) for digest in digests)


@pytest.mark.parametrize(
    ("runtime", "code", "log"),
    [
        ("apptainer", -9, "FATAL:   x"),
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
UNKNOWN_FLAG = 'Error for command "exec": unknown flag: --frob'
CAPABILITIES = "Requesting capability set 0x1ff while permitted capability set is 0x1fe"


@pytest.mark.parametrize(
    ("runtime", "code", "log", "error", "fix"),
    [
        ("apptainer", 255, FAILED_MOUNT, "FATAL: container creation failed: mount /nowhere error", ""),
        ("enroot", 1, NO_FUSE, " ".join(NO_FUSE.splitlines()), ""),
        ("pyxis", 1, PYXIS_LOG, "pyxis: [ERROR] No such file", ""),
        ("pyxis", 2, "slurmstepd-n1: error: execve(): sh: No such file\n", "execve(): sh: No such file", ""),
        ("pyxis", 1, PYXIS_MOUNT_LOG, "pyxis: --container-mounts: source path does not exist: /nowhere", ""),
        ("pyxis", 1, PYXIS_CORRUPT_LOG, "pyxis: FATAL ERROR: File system corruption detected", ""),
        ("apptainer", 1, f"\x1b[91mERROR  : {CAPABILITIES}\n\x1b[0m", f"ERROR : {CAPABILITIES}", f": {ON_NODES}"),
        ("apptainer", 1, f"{UNKNOWN_FLAG}\n\nOptions for exec:\n  -u, --userns\n", UNKNOWN_FLAG, ": see contain"),
        ("pyxis", 1, PYXIS_DEVICES_LOG,
         "pyxis: create_inode: could not create character device /d/dev/null, because you're not superuser!",
         f": {ON_NODES}"),
        ("pyxis", 1, "slurmstepd: error: pyxis: child 7 failed with error code: 1\n"
         "slurmstepd: error: pyxis:     [ERROR] Invalid image reference: docker://Site/image:1\n",
         "pyxis: [ERROR] Invalid image reference: docker://Site/image:1", ": write container.image as "),
    ],
)  # fmt: skip
def test_runtime_failures_name_reason_and_fix(runtime: str, code: int, log: str, error: str, fix: str) -> None:
    found = start_failure(runtime, code, log)
    assert found is not None
    text = f"{runtime} could not start the container (exit code {code}): {error}"
    assert found[0].startswith(f"{text}{fix}")
    assert fix or found[0] == text
    assert found[1] == (fix == "")
