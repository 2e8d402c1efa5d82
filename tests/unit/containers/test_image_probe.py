"""The start of an image to read its versions, and errors of runtimes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from containers import (
    IMAGE,
    PYXIS_CORRUPT_LOG,
    PYXIS_DEVICES_LOG,
    PYXIS_LOG,
    PYXIS_MOUNT_LOG,
    PYXIS_PROGRESS,
    SPEC,
    install_podman,
    probe_output,
)

import hpcdist
from hpcdist.containers.spec import Mount
from hpcdist.containers.steps import (
    DIGEST_BYTES,
    check_image_on_nodes,
    image_digest,
    image_probe_command,
    image_probe_env,
    probe_outcome,
    start_failure,
)
from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.host.machine import source_digest

# --- The check of an image


def test_source_digest_depends_on_code_alone(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text("a = 1\n")
    digest_before = source_digest(str(tmp_path))
    (tmp_path / "sub" / "notes.md").write_text("no code")
    assert source_digest(str(tmp_path)) == digest_before
    (tmp_path / "sub" / "a.py").rename(tmp_path / "sub" / "b.py")
    assert source_digest(str(tmp_path)) != digest_before


# --- image check
@pytest.mark.processes
def test_probe_reports_the_versions_of_its_python(tmp_path: Path) -> None:
    command = image_probe_command(replace(SPEC, runtime="charliecloud", python=sys.executable)).argv
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


@pytest.mark.parametrize("found", ["{]}", '{"python": "3.x"}', '{"python": null}', "{}"])
def test_odd_answer_of_an_image_is_one_clear_problem(found: str) -> None:
    known = {"hpcdist": hpcdist.__version__, "source": source_digest(str(Path(hpcdist.__file__).parent))}
    if found != "{]}":
        found = json.dumps(known | json.loads(found))
    _, problem, may_pass = probe_outcome(SPEC, f"hpcdist-image {found}", "", "n2")
    assert problem.startswith(f"{SPEC.image} gives no valid description of its Python on n2: ")
    assert not may_pass


def test_probe_has_neither_mounts_nor_pythonpath() -> None:
    spec = replace(SPEC, runtime="charliecloud", mounts=(Mount(source="/p", target="/p"),))
    assert not [word for word in image_probe_command(spec).argv if word.startswith("--bind")]
    assert image_probe_env(spec, {"PYTHONPATH": "/host", "NCCL_DEBUG": "INFO", "USER": "ada"}) == {
        "NCCL_DEBUG": "INFO",
        "USER": "ada",
    }


@pytest.mark.parametrize(
    ("output", "errors", "message"),
    [
        (probe_output(hpcdist=None), "", f"{IMAGE} has no hpcdist for its python3: see container.python"),
        (
            probe_output(source="0123456789ab"),
            "",
            f"{IMAGE} has hpcdist {hpcdist.__version__} from other source files than this one: build it again",
        ),
        (
            probe_output(hpcdist="0.0.9"),
            "",
            f"{IMAGE} has hpcdist 0.0.9, this is {hpcdist.__version__}: build it again, or install 0.0.9",
        ),
        (probe_output(python="3.9.2"), "", f"{IMAGE} has Python 3.9.2; hpcdist needs 3.11 or newer"),
        (
            probe_output(driver="535.104.05"),
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
def test_problems_that_need_the_user_are_not_retried(output: str, errors: str, message: str) -> None:
    _, problem, may_pass = probe_outcome(replace(SPEC, gpus="all"), output, errors, "n2")
    assert (problem, may_pass) == (message, False)


ON_NODES = "docs/how-to/containers.md lists what the runtime needs on each node"


# The texts of docker 20.10 and 28, and of apptainer 1.4, as printed on Debian.
@pytest.mark.parametrize(
    ("runtime", "errors", "fix"),
    [
        (
            "docker",
            "docker: Error response from daemon: failed to create shim task: OCI runtime create failed: runc create"
            " failed: unable to start container process: error during container init: error setting rlimits for ready"
            " process: error setting rlimit type 8: operation not permitted: unknown.",
            "its daemon lacks CAP_SYS_RESOURCE",
        ),
        (
            "docker",
            "docker: permission denied while trying to connect to the Docker daemon socket at unix:///run/docker.sock:"
            ' Head "http://%2Frun%2Fdocker.sock/_ping": dial unix /run/docker.sock: connect: permission denied\n\n'
            "Run 'docker run --help' for more information",
            ON_NODES,
        ),
        (
            "docker",
            'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
            ON_NODES,
        ),
        ("apptainer", "FATAL:   squashfuse_ll exited: fuse: failed to open /dev/fuse: Permission denied", ON_NODES),
        (
            "apptainer",
            "ERROR  : Failed to create user namespace: maximum number of user namespaces exceeded, check"
            " /proc/sys/user/max_user_namespaces\nINFO   : A system administrator may need to enable user namespaces",
            ON_NODES,
        ),
        ("enroot", "[ERROR] Command not found: squashfuse", ON_NODES),
        ("enroot", "[ERROR] Invalid argument: /images/x.sqsh", ON_NODES),
        ("enroot", "mkdir: cannot create directory '/run/enroot': Permission denied", ON_NODES),
        ("enroot", "Usage: enroot start NAME|IMAGE\n\nStart a container\n --uts  Run it", "see container.extra_args"),
    ],
)
def test_errors_that_no_retry_solves_have_a_fix(runtime: str, errors: str, fix: str) -> None:
    _, problem, may_pass = probe_outcome(replace(SPEC, runtime=runtime), "", errors, "n2")
    first = " ".join(errors.splitlines()[0].split())
    assert problem.startswith(f"{runtime} could not start {IMAGE} on n2: {first}: {fix}")
    assert not may_pass


@pytest.mark.parametrize("driver", ["580.65.06", "595.10", None])
def test_new_or_unknown_driver_is_accepted(driver: str | None) -> None:
    assert probe_outcome(replace(SPEC, gpus="all"), probe_output(driver=driver), "", "n1")[1] == ""
    assert probe_outcome(SPEC, probe_output(driver="400.1"), "", "n1")[1] == "", "the ranks use no GPU"


def test_other_start_failures_are_retried() -> None:
    message = f"podman could not start {IMAGE} on n2: Error: no space left"
    assert probe_outcome(SPEC, "", "srun: error: n2: task 1: Exited\nError: no space left\n", "n2") == (
        None,
        message,
        True,
    )


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


def test_unlabelled_errors_of_pyxis_apply_to_all_nodes() -> None:
    errors = 'srun: error: pyxis: --container-mounts: invalid format: "/a"\nsrun: error: Invalid --container-mounts'
    with pytest.raises(HpcdistError) as raised:
        check_image_on_nodes(replace(SPEC, runtime="pyxis"), ["n1", "n2"], "", errors)
    problem = f'pyxis could not start {IMAGE} on n1, n2: pyxis: --container-mounts: invalid format: "/a"'
    assert str(raised.value) == problem


def test_padded_task_labels_are_parsed() -> None:
    nodes = [f"n{number}" for number in range(11)]
    output = "".join(f"{number:2d}: {probe_output()}\n" for number in range(11))
    assert check_image_on_nodes(SPEC, nodes, output, "")["hpcdist"] == hpcdist.__version__


@pytest.mark.processes
def test_digest_comes_from_the_store_or_the_file_name(tmp_path: Path) -> None:
    env = install_podman(tmp_path, f"echo {'ab' * 32}")
    assert image_digest(SPEC, env) == f"sha256:{'ab' * 32}"
    assert image_digest(SPEC, {"PATH": "/nowhere"}) is None
    assert (
        image_digest(replace(SPEC, runtime="apptainer", image="/i/hpcdist-0.1.0-0123456789ab.sif"), {})
        == "sha256:0123456789ab"
    )
    assert image_digest(replace(SPEC, runtime="charliecloud", image="/i/mine"), {}) is None
    assert image_digest(replace(SPEC, runtime="charliecloud", image=str(tmp_path)), {}) is None


def test_digest_of_an_image_file_changes_with_its_size_start_and_end(tmp_path: Path) -> None:
    def digest_of(content: bytes) -> str | None:
        (tmp_path / "mine.sif").write_bytes(content)
        return image_digest(replace(SPEC, runtime="apptainer", image=str(tmp_path / "mine.sif")), {})

    middle = bytes(3 * DIGEST_BYTES)
    digests = [digest_of(content) for content in (middle, b"1" + middle[1:], middle[1:] + b"1", middle[1:], b"short")]
    assert len(set(digests)) == 5
    assert all(digest is not None and re.fullmatch("ends-sha256:[0-9a-f]{64}", digest) for digest in digests)
    assert digest_of(middle) == digests[0]


# --- The errors of runtimes that cannot start a container


@pytest.mark.parametrize(
    ("runtime", "code", "log"),
    [
        ("podman", 1, "Error: mine"),
        ("podman", 137, "Error: mine"),
        ("charliecloud", 1, "ch-run[7]: warning\nValueError: x"),
        ("charliecloud", -9, "ch-run[7]: x"),
        ("apptainer", 1, "WARNING: passwd file doesn't exist in container, not updating\nValueError: x\n"),
        ("enroot", 1, "ValueError: x\nmkdir: cannot create directory '/data': Permission denied"),
        ("pyxis", 1, f"{PYXIS_PROGRESS}ValueError: x\nslurmstepd: error: *** STEP 5.0 ON n1 CANCELLED ***\n"),
        ("pyxis", 137, PYXIS_PROGRESS),
    ],
)
def test_failures_of_the_rank_are_not_those_of_the_runtime(runtime: str, code: int, log: str) -> None:
    assert start_failure(runtime, code, log) is None


NO_FUSE = "[WARN] Something went wrong trying to read the squashfs image.\n[ERROR] Failed to mount: /i.sqsh"
FAILED_MOUNT = (
    "INFO:    gocryptfs not found, will not be able to use gocryptfs\n"
    "\x1b[31mFATAL:  \x1b[0m container creation failed: mount /nowhere->/nowhere error\nINFO:    Cleaning up image...\n"
)
CANCELED = (
    'docker: Error response from daemon: error mounting "/nowhere" to rootfs: no such file or directory.\n'
    'time="2026-11-22T15:36:48Z" level=error msg="error waiting for container: context canceled"\n'
)
HELP = "Run 'docker run --help' for more information"


@pytest.mark.parametrize(
    ("runtime", "code", "log", "error"),
    [
        ("podman", 125, "x\nError: no space\n", "Error: no space"),
        ("charliecloud", 1, "ch-run[7]: error: can't stat: /i", "ch-run[7]: error: can't stat: /i"),
        ("apptainer", 255, "FATAL: no", "FATAL: no"),
        ("apptainer", 255, "ERROR  : could not open image /i.sif", "ERROR : could not open image /i.sif"),
        ("apptainer", 255, FAILED_MOUNT, "FATAL: container creation failed: mount /nowhere->/nowhere error"),
        ("enroot", 1, "enroot-mount: failed to mount: /no", "enroot-mount: failed to mount: /no"),
        ("enroot", 1, NO_FUSE, " ".join(NO_FUSE.splitlines())),
        ("docker", 125, f"docker: Error response: no space\n\n{HELP}", "docker: Error response: no space"),
        ("docker", 125, CANCELED, CANCELED.splitlines()[0]),
        ("pyxis", 1, PYXIS_LOG, "pyxis: [ERROR] No such file"),
        ("pyxis", 2, "slurmstepd-n1: error: execve(): sh: No such file\n", "execve(): sh: No such file"),
        ("pyxis", 1, PYXIS_MOUNT_LOG, "pyxis: --container-mounts: source path does not exist: /nowhere"),
        ("pyxis", 1, PYXIS_CORRUPT_LOG, "pyxis: FATAL ERROR: File system corruption detected"),
    ],
)  # fmt: skip
def test_failures_of_the_runtime_may_pass(runtime: str, code: int, log: str, error: str) -> None:
    assert start_failure(runtime, code, log) == (
        f"{runtime} could not start the container (exit code {code}): {error}",
        True,
    )


UNKNOWN_FLAG = 'Error for command "exec": unknown flag: --frob'
CAPABILITIES = "Requesting capability set 0x1ff while permitted capability set is 0x1fe"


@pytest.mark.parametrize(
    ("runtime", "code", "log", "error"),
    [
        ("docker", 127, "", "it printed nothing"),
        ("podman", 126, "e", "e"),
        ("apptainer", 1, f"\x1b[91mERROR  : {CAPABILITIES}\n\x1b[0m", f"ERROR : {CAPABILITIES}: root lacks"),
        ("apptainer", 1, f"{UNKNOWN_FLAG}\n\nOptions for exec:\n  -u, --userns\n", f"{UNKNOWN_FLAG}: see contain"),
        ("docker", 125, f"unknown flag: --frob\n\nUsage:  docker run\n\n{HELP}\n", "unknown flag: --frob: see contain"),
        (
            "pyxis",
            1,
            PYXIS_DEVICES_LOG,
            "pyxis: create_inode: could not create character device /d/dev/null, because you're not superuser!: only",
        ),
    ],
)  # fmt: skip
def test_failures_that_no_retry_solves(runtime: str, code: int, log: str, error: str) -> None:
    found = start_failure(runtime, code, log)
    assert found is not None
    assert found[0].startswith(f"{runtime} could not start the container (exit code {code}): {error}")
    assert not found[1]
