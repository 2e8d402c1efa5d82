"""Tests of `node_wrapper.sh` and process 1 of a container with a replacement for podman.

Like podman, the replacement leaves its containers running when Slurm kills it.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import wait_for

from hpcdist.containers.spec import SCRIPT

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

FAKE = Path(__file__).parents[2] / "support" / "fake_podman.py"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Prints each received signal, and exits with 7 at SIGTERM.
RANK = """
import os, signal, sys, time
def receive(number, _):
    print("received", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(7)
ignored = signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, receive)
print("rank", os.getpid(), "USR2 ignored at first:", ignored, flush=True)
while True:
    time.sleep(0.02)
"""


class Node:
    """A node with podman and docker, and the folder of an attempt."""

    def __init__(self, root: Path) -> None:
        self.state = root / "state"
        self.attempt = root / "run 1" / "attempts" / "001"
        self.log = self.attempt / "rank-00003.log"
        bin_folder = root / "bin"
        for folder in (self.state, self.attempt, bin_folder):
            folder.mkdir(parents=True)
        tool = bin_folder / "podman"
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{FAKE}" "$@"\n')
        tool.chmod(0o755)
        (bin_folder / "docker").symlink_to(tool)
        self.env = {
            "PATH": f"{bin_folder}:/usr/bin:/bin",
            "FAKE_PODMAN": str(self.state),
            "SLURM_JOB_ID": "7",
            "SLURM_PROCID": "3",
            "SLURMD_NODENAME": "n2",
            "HPCDIST_ATTEMPT": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }

    def script(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", str(SCRIPT), *arguments]
        return subprocess.run(command, env=self.env | env, capture_output=True, text=True, check=False, timeout=60)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start the task of a rank, which shares the log of the rank."""
        first = [sys.executable, "-m", "hpcdist.containers.pid1", str(self.attempt)]
        arguments = ["rank", str(self.attempt), "SLURM_*", "podman", "run", "--label=hpcdist.run=/r", "IMAGE", *first]
        with open(self.log, "ab") as log:
            return subprocess.Popen(["sh", str(SCRIPT), *arguments, *command], env=self.env, stdout=log, stderr=log)

    def args(self, name: str = "unnamed") -> list[str]:
        return (self.state / f"{name}.args").read_text().splitlines()

    def log_text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def pid(self) -> int:
        """Return the process id of the rank once it handles signals."""
        return int(wait_for(lambda: self.log_text().partition("rank ")[2].partition(" USR2")[0], "the rank to start"))

    def is_clean(self) -> bool:
        return [path.name for path in self.attempt.iterdir()] == ["rank-00003.log"] and not [*self.state.glob("*.pid")]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    for path in node.state.glob("*.pid"):
        with suppress(ProcessLookupError):
            os.killpg(int(path.read_text()), signal.SIGKILL)


def test_podman_gets_user_devices_and_matching_variables(node: Node) -> None:
    variables = {
        "NCCL_DEBUG": "INFO",
        "NCCL_X": "two\nTOKEN=lines",
        "TOKEN": "s",
        "WANDB": "off",
        "HPCDIST_TRACKING_URI": "s",
    }
    done = node.script("once", "NCCL_*|WANDB|HPCDIST_*", "podman", "run", "--rm", "IMAGE", "true", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    *flags, rm, image, command = node.args()
    assert [rm, image, command] == ["--rm", "IMAGE", "true"]
    user = f"--user={os.getuid()}:{os.getgid()}"
    mapping = [] if os.getuid() == 0 else ["--userns=keep-id"]
    devices = ["--device=/dev/infiniband"] if Path("/dev/infiniband").exists() else []
    names = [flag for flag in flags if flag.startswith("--env=")]
    assert sorted(names) == ["--env=HPCDIST_ATTEMPT", "--env=NCCL_DEBUG", "--env=NCCL_X", "--env=WANDB"]
    assert [flag for flag in flags if flag not in names] == [user, *mapping, *devices]


def test_docker_gets_user_groups_and_devices(node: Node) -> None:
    assert node.script("once", "WANDB", "docker", "run", "IMAGE", "true").returncode == 0
    groups = [f"--group-add={group}" for group in subprocess.check_output(["id", "-G"], text=True).split()]
    has_rdma = Path("/dev/infiniband").exists()
    devices = ["--ulimit=memlock=-1", "--device=/dev/infiniband"] if has_rdma else []
    assert node.args() == [f"--user={os.getuid()}:{os.getgid()}", *groups, *devices, "IMAGE", "true"]


@pytest.mark.parametrize("is_installed", [True, False])
def test_squashfuse_of_apptainer_ignores_the_signals_of_slurm(node: Node, tmp_path: Path, is_installed: bool) -> None:
    """Without the program apptainer unpacks the image, so the replacement must not be found either."""
    system, scripts = tmp_path / "system", tmp_path / "scripts"
    system.mkdir()
    shutil.copytree(SCRIPT.parent / "apptainer_mount", scripts / "apptainer_mount")
    for name in (SCRIPT.name, "apptainer_mount/squashfuse_ll"):
        text = (SCRIPT.parent / name).read_text()
        assert text.count(SYSTEM_PATH) == 1
        scripts.joinpath(name).write_text(text.replace(SYSTEM_PATH, str(system)))
    status = "print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith('SigIgn')])"
    programs = {
        # apptainer looks the program up, and starts it with an empty environment.
        Path(node.env["PATH"].partition(":")[0]) / "apptainer": (
            'case $PATH in *apptainer_mount*) exec env -i "$(command -v squashfuse_ll)" ;; esac; echo unpacked'
        ),
        system / "squashfuse_ll": f'exec "{sys.executable}" -S -c "{status}"',
    }
    for path, text in programs.items():
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    if not is_installed:
        (system / "squashfuse_ll").unlink()
    command = ["sh", str(scripts / SCRIPT.name), "plain", "apptainer"]
    done = subprocess.run(command, env=node.env, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    if not is_installed:
        assert done.stdout == "unpacked\n"
        return
    mask = int(done.stdout, 16)
    ignored = {number for number in signal.valid_signals() if mask >> (number - 1) & 1}
    assert {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2} <= ignored


def test_missing_runtime_is_reported_in_one_line(node: Node) -> None:
    for arguments in (["once", "X"], ["plain"], ["rank", "/nowhere", "X"]):
        done = node.script(*arguments, "apptainer", "exec", "IMAGE")
        assert (done.returncode, done.stderr) == (127, "hpcdist: apptainer is not installed on n2\n")


def test_container_has_name_and_labels_and_the_exit_code_of_the_rank(node: Node) -> None:
    assert node.start("sh", "-c", "echo hello; exit 5").wait(60) == 5
    name = "hpcdist-7-1-3"
    assert {f"--name={name}", "--label=hpcdist.job=7", "--label=hpcdist.attempt=1"} <= set(node.args(name))
    assert node.log_text() == "hello\n"
    assert node.is_clean()


def test_signals_are_forwarded_to_the_rank(node: Node) -> None:
    task = node.start(sys.executable, "-c", RANK)
    node.pid()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        task.send_signal(number)
        wait_for(lambda number=number: f"received {number.name}" in node.log_text(), number.name)  # type: ignore[misc]
    assert task.wait(60) == 7
    assert "USR2 ignored at first: True" in node.log_text()
    assert node.is_clean()


def test_killed_rank_has_the_exit_code_of_its_signal(node: Node) -> None:
    task = node.start(sys.executable, "-c", RANK)
    os.kill(node.pid(), signal.SIGKILL)
    assert task.wait(60) == 128 + signal.SIGKILL
    assert node.is_clean()


def test_rank_survives_the_death_of_the_podman_client(node: Node) -> None:
    """Slurm may signal all child processes of a step."""
    task = node.start(sys.executable, "-c", RANK)
    node.pid()
    clients = Path(f"/proc/{task.pid}/task/{task.pid}/children").read_text().split()
    os.kill(int(clients[0]), signal.SIGKILL)
    wait_for((node.state / "attached").exists, "the script to attach again")
    assert task.poll() is None
    task.terminate()
    assert task.wait(60) == 7
    assert "received SIGTERM" in node.log_text()
    assert node.is_clean()


def test_container_ends_with_its_step(node: Node) -> None:
    task = node.start(sys.executable, "-c", RANK)
    node.pid()
    task.kill()
    task.wait(60)
    wait_for(lambda: "the Slurm step around this container is gone" in node.log_text(), "process 1 to notice")
    assert not [*node.attempt.glob("*.line")], "a remaining pipe would block copies of the folder"


def test_start_failure_has_exit_code_and_message_of_podman(node: Node) -> None:
    done = node.script("rank", str(node.attempt), "X", "podman", "run", "UNKNOWN", "true")
    assert (done.returncode, done.stderr) == (125, "Error: image not known\n")
    assert [*node.attempt.iterdir()] == []


def test_only_containers_of_the_run_are_removed(node: Node) -> None:
    label = "hpcdist.run=/runs/my run"
    processes = [
        subprocess.Popen(
            ["podman", "run", f"--name={name}", f"--label={text}", "IMAGE", "sleep", "1000"],
            env=node.env,
            executable=str(Path(node.env["PATH"].partition(":")[0]) / "podman"),
        )
        for name, text in (("mine", label), ("other", f"{label}2"))
    ]
    wait_for(lambda: len([*node.state.glob("*.pid")]) == 2, "the containers")
    assert node.script("remove", "podman", label).returncode == 0
    assert processes[0].wait(60) == 128 + signal.SIGKILL
    assert [path.name for path in node.state.glob("*.pid")] == ["other.pid"]
    assert processes[1].poll() is None
    assert node.script("remove", "podman", "hpcdist.run=/none").returncode == 0
    processes[1].kill()
    processes[1].wait()


def test_command_script_of_enroot_changes_the_folder(node: Node) -> None:
    done = node.script("in", str(node.attempt), "pwd")
    assert (done.returncode, done.stdout) == (0, f"{node.attempt}\n")


#: Starts squashfuse as `enroot start IMAGE.sqsh` does, and becomes the rank once the image is mounted.
ENROOT = """#!/bin/bash
squashfuse -f "${@: -1}" &
while [ ! -e "$FAKE_PODMAN/mounted" ]; do sleep 0.02; done
exec sleep 600
"""
SQUASHFUSE = """#!/bin/sh
echo "$$ $*" >"$FAKE_PODMAN/mounting"
mv "$FAKE_PODMAN/mounting" "$FAKE_PODMAN/mounted"
exec sleep 600
"""


def test_mount_of_enroot_ignores_the_signals_of_slurm_and_ends_with_the_container(node: Node) -> None:
    for name, text in (("enroot", ENROOT), ("squashfuse", SQUASHFUSE)):
        tool = Path(node.env["PATH"].partition(":")[0]) / name
        tool.write_text(text)
        tool.chmod(0o755)
    command = ["sh", str(SCRIPT), "once", "SLURM_*", "enroot", "start", "/image.sqsh"]
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
    tool = Path(node.env["PATH"].partition(":")[0]) / "enroot"
    listed = r"pyxis_7.0\npyxis_7_7.1\npyxis_7_mine\npyxis_77.0\nmine\n"
    tool.write_text(f'#!/bin/sh\n[ "$1" = list ] && printf "{listed}" || echo "$@"\n')
    tool.chmod(0o755)
    done = node.script("remove", "pyxis", "7")
    assert (done.returncode, done.stdout) == (0, "remove --force pyxis_7.0\nremove --force pyxis_7_7.1\n")
    tool.unlink()
    assert node.script("remove", "pyxis", "7").returncode == 0


def ignored_signals(process: psutil.Process) -> set[int]:
    (line,) = (line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "SigIgn" in line)
    return {number for number in range(1, 65) if int(line.split()[1], 16) & (1 << (number - 1))}


def test_patterns_are_never_executed(node: Node, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "SLURM_file").touch()  # patterns must not expand to files
    for hostile in ("A) touch x;; B", "A$(touch x)", "`touch x`", "'", '"', "*) touch x"):
        command = ["sh", str(SCRIPT), "once", f"{hostile}|SLURM_P*", "podman", "run", "IMAGE", "true"]
        done = subprocess.run(command, env=node.env, cwd=folder, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert [path.name for path in folder.iterdir()] == ["SLURM_file"]
        assert [flag for flag in node.args() if "SLURM" in flag] == ["--env=SLURM_PROCID"]
