"""`node_wrapper.sh`, which starts containers on a node, and its replacements of programs that mount images."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import wait_for

from hpcdist.containers.runtimes import NODE_WRAPPER

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Node:
    """A node with scripts of the tests as container runtimes."""

    def __init__(self, root: Path) -> None:
        self.state = root / "state"
        self.programs = root / "bin"
        for folder in (self.state, self.programs):
            folder.mkdir(parents=True)
        self.env = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "STATE": str(self.state),
            "SLURM_PROCID": "3",
            "SLURMD_NODENAME": "n2",
        }

    def add(self, name: str, text: str) -> None:
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)

    def script(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", str(NODE_WRAPPER), *arguments]
        return subprocess.run(command, env=self.env | env, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_enroot_gets_the_names_of_variables_without_values(node: Node) -> None:
    node.add("enroot", '#!/bin/sh\nfor word; do echo "$word"; done\n')
    variables = {"NCCL_DEBUG": "INFO", "NCCL_X": "two\nHIDDEN=lines", "HOME": "/h", "ENROOT_LOGIN_SHELL": "no"}
    done = node.script("enroot", "start", "--rc=x", "/i.sqsh", "in", "/", "true", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    start, *flags = done.stdout.splitlines()
    names = {flag for flag in flags if flag.startswith("--env=")}
    expected = {"NCCL_DEBUG", "NCCL_X", "STATE", "SLURM_PROCID", "SLURMD_NODENAME"}
    if Path("/dev/infiniband").exists():
        expected.add("MELLANOX_VISIBLE_DEVICES=all")
    assert names == {f"--env={name}" for name in expected}
    assert [start, *flags[len(names) :]] == ["start", "--rc=x", "/i.sqsh", "in", "/", "true"]


@pytest.mark.parametrize("is_installed", [True, False])
def test_squashfuse_of_apptainer_ignores_the_signals_of_slurm(node: Node, tmp_path: Path, is_installed: bool) -> None:
    """Without the program apptainer unpacks the image, so the replacement must not be found either."""
    system, scripts = tmp_path / "system", tmp_path / "scripts"
    system.mkdir()
    shutil.copytree(NODE_WRAPPER.parent / "apptainer_mount", scripts / "apptainer_mount")
    for name in (NODE_WRAPPER.name, "apptainer_mount/squashfuse_ll"):
        text = (NODE_WRAPPER.parent / name).read_text()
        assert text.count(SYSTEM_PATH) == 1
        scripts.joinpath(name).write_text(text.replace(SYSTEM_PATH, str(system)))
    status = "print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith('SigIgn')])"
    programs = {
        # apptainer looks the program up, and starts it with an empty environment.
        node.programs / "apptainer": (
            'case $PATH in *apptainer_mount*) exec env -i "$(command -v squashfuse_ll)" ;; esac; echo unpacked'
        ),
        system / "squashfuse_ll": f'exec "{sys.executable}" -S -c "{status}"',
    }
    for path, text in programs.items():
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    if not is_installed:
        (system / "squashfuse_ll").unlink()
    command = ["sh", str(scripts / NODE_WRAPPER.name), "apptainer"]
    done = subprocess.run(command, env=node.env, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    if not is_installed:
        assert done.stdout == "unpacked\n"
        return
    mask = int(done.stdout, 16)
    ignored = {number for number in signal.valid_signals() if mask >> (number - 1) & 1}
    assert {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2} <= ignored


def test_missing_runtime_is_reported_in_one_line(node: Node) -> None:
    for runtime in ("apptainer", "enroot"):
        done = node.script(runtime, "IMAGE")
        assert (done.returncode, done.stderr) == (127, f"hpcdist: {runtime} is not installed on n2\n")


def test_command_script_of_enroot_changes_the_folder(node: Node) -> None:
    done = node.script("in", str(node.state), "pwd")
    assert (done.returncode, done.stdout) == (0, f"{node.state}\n")


#: Starts squashfuse as `enroot start IMAGE.sqsh` does, and becomes the rank once the image is mounted.
ENROOT = """#!/bin/bash
squashfuse -f "${@: -1}" &
while [ ! -e "$STATE/mounted" ]; do sleep 0.02; done
exec sleep 600
"""
SQUASHFUSE = """#!/bin/sh
echo "$$ $*" >"$STATE/mounting"
mv "$STATE/mounting" "$STATE/mounted"
exec sleep 600
"""


def test_enroot_mount_outlives_slurms_signals(node: Node) -> None:
    for name, text in (("enroot", ENROOT), ("squashfuse", SQUASHFUSE)):
        node.add(name, text)
    command = ["sh", str(NODE_WRAPPER), "enroot", "start", "/image.sqsh"]
    rank = subprocess.Popen(command, env=node.env, start_new_session=True)
    try:
        wait_for((node.state / "mounted").exists, "the image to be mounted")
        pid, arguments = (node.state / "mounted").read_text().strip().split(" ", 1)
        mount = psutil.Process(int(pid))
        assert arguments == "-f /image.sqsh"
        assert os.getpgid(mount.pid) != os.getpgid(rank.pid), "enroot kills the process group when it gets SIGCONT"
        for process in (mount, *mount.parents()[:2]):
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
                assert number in ignored_signals(process), process
    finally:
        rank.kill()
        rank.wait()
    wait_for(lambda: not mount.is_running(), "the mount to end with the container")


def test_interrupted_containers_of_pyxis_are_removed(node: Node) -> None:
    listed = r"pyxis_7.0\npyxis_7_7.1\npyxis_7_mine\npyxis_77.0\nmine\n"
    node.add("enroot", f'#!/bin/sh\n[ "$1" = list ] && printf "{listed}" || echo "$@"\n')
    done = node.script("remove", "7")
    assert (done.returncode, done.stdout) == (0, "remove --force pyxis_7.0\nremove --force pyxis_7_7.1\n")
    (node.programs / "enroot").unlink()
    assert node.script("remove", "7").returncode == 0


def ignored_signals(process: psutil.Process) -> set[int]:
    (line,) = (line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "SigIgn" in line)
    return {number for number in range(1, 65) if int(line.split()[1], 16) & (1 << (number - 1))}
