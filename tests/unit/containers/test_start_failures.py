"""Tests of the errors of runtimes that cannot start a container."""

from __future__ import annotations

import pytest
from container_facts import PYXIS_CORRUPT_LOG, PYXIS_DEVICES_LOG, PYXIS_LOG, PYXIS_MOUNT_LOG, PYXIS_PROGRESS

from hpcdist.containers.probe import start_failure


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
            "apptainer",
            255,
            "INFO:    gocryptfs not found, will not be able to use gocryptfs\n"
            "\x1b[31mFATAL:  \x1b[0m container creation failed: mount /nowhere->/nowhere error\n"
            "INFO:    Cleaning up image...\n",
            (
                "apptainer could not start the container (exit code 255):"
                " FATAL: container creation failed: mount /nowhere->/nowhere error",
                True,
            ),
        ),
        (
            "apptainer",
            1,
            "\x1b[91mERROR  : Requesting capability set 0x1ff while permitted capability set is 0x1fe\n\x1b[0m",
            (
                "apptainer could not start the container (exit code 1): ERROR : Requesting capability set 0x1ff while"
                " permitted capability set is 0x1fe: root lacks a capability here (as in a container): name it in"
                " APPTAINER_DROP_CAPS, for example `export APPTAINER_DROP_CAPS=CAP_SYS_RESOURCE`",
                False,
            ),
        ),
        (
            "apptainer",
            1,
            'Error for command "exec": unknown flag: --frob\n\nOptions for exec command:\n  -u, --userns\n\n'
            "Run 'apptainer --help' for more detailed usage information.\n",
            (
                "apptainer could not start the container (exit code 1):"
                ' Error for command "exec": unknown flag: --frob: see container.extra_args',
                False,
            ),
        ),
        ("apptainer", 1, "WARNING: passwd file doesn't exist in container, not updating\nValueError: x\n", None),
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
            "enroot",
            1,
            "[WARN] Something went wrong trying to read the squashfs image.\n[ERROR] Failed to mount: /i.sqsh",
            (
                "enroot could not start the container (exit code 1): [WARN] Something went wrong trying to read the"
                " squashfs image. [ERROR] Failed to mount: /i.sqsh",
                True,
            ),
        ),
        ("enroot", 1, "ValueError: x\nmkdir: cannot create directory '/data': Permission denied", None),
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
            "docker",
            125,
            'docker: Error response from daemon: error mounting "/nowhere" to rootfs: no such file or directory.\n'
            'time="2026-11-22T15:36:48Z" level=error msg="error waiting for container: context canceled"\n',
            (
                "docker could not start the container (exit code 125): docker: Error response from daemon:"
                ' error mounting "/nowhere" to rootfs: no such file or directory.',
                True,
            ),
        ),
        (
            "docker",
            125,
            "unknown flag: --frob\n\nUsage:  docker run [OPTIONS] IMAGE [COMMAND] [ARG...]\n\n"
            "Run 'docker run --help' for more information\n",
            (
                "docker could not start the container (exit code 125): unknown flag: --frob: see container.extra_args",
                False,
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
        (
            "pyxis",
            2,
            "slurmstepd-n1: error: execve(): sh: No such file or directory\n",
            ("pyxis could not start the container (exit code 2): execve(): sh: No such file or directory", True),
        ),
        (
            "pyxis",
            1,
            PYXIS_MOUNT_LOG,
            (
                "pyxis could not start the container (exit code 1): pyxis: --container-mounts: source path does not"
                " exist: /nowhere",
                True,
            ),
        ),
        (
            "pyxis",
            1,
            PYXIS_CORRUPT_LOG,
            (
                "pyxis could not start the container (exit code 1):"
                " pyxis: FATAL ERROR: File system corruption detected",
                True,
            ),
        ),
        (
            "pyxis",
            1,
            PYXIS_DEVICES_LOG,
            (
                "pyxis could not start the container (exit code 1): pyxis: create_inode: could not create character"
                " device /d/dev/null, because you're not superuser!: only root can unpack the device files of this"
                " image, and no container needs them: create the .sqsh again with `mksquashfs … -wildcards -e 'dev/*'`",
                False,
            ),
        ),
    ],
)
def test_failures_of_the_runtime_differ_from_those_of_the_rank(
    runtime: str, code: int, log: str, expected: tuple[str, bool] | None
) -> None:
    assert start_failure(runtime, code, log) == expected
