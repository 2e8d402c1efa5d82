"""Tests with a real docker daemon: builds with BuildKit, the README's command, restarts, and docker/compose.yaml."""

import base64
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import yaml
from containers import (
    BASE,
    CHECKOUT,
    RUNTIMES,
    UNKNOWN_UID,
    Containers,
    last_lines,
    only_run,
    weights_hash,
    write_index_secrets,
)
from hpcdist_runs import wait_for

from hpcdist.supervisor.children import Guard

# --- A docker daemon of the tests in namespaces of its own: bridges, published ports and its firewall stay in there

STORE = Path("/var/tmp/hpcdist-tests/docker")
#: Leaves out limits that root may not raise, as in a container.
RUNC = CHECKOUT / "tests/support/runc_within_limits.sh"
#: Where scripts/runtimes/docker.sh installs the docker of Debian sid; without it the installed one is used.
SID = RUNTIMES / "docker"
PLUGINS = SID / "usr/libexec/docker/cli-plugins"
#: `host`: the network of this machine without bridges, for builds that download packages. `own`: bridges, network
#: address translation and published ports in a network namespace without a way to other machines.
Network = Literal["host", "own"]
#: The shell becomes the daemon, process 1 of its namespace: whatever it started ends with it. A new /sys shows the
#: devices of the new network namespace; the control groups below the old one stay.
_IN_NAMESPACES = """
set -e
if [ "$1" = own ]; then
  ip link set lo up
  mount --rbind /sys/fs/cgroup "$2/cgroups"
  mount -t sysfs sysfs /sys
  mount --rbind "$2/cgroups" /sys/fs/cgroup
  echo 1 > /proc/sys/net/ipv4/ip_forward
fi
shift 2
exec "$@"
"""


@dataclass(frozen=True)
class DockerBox:
    """A running docker daemon, and commands that use it."""

    folder: Path  #: socket, log and client configuration
    env: dict[str, str]
    pid: int  #: process id of the daemon on this machine

    def run(self, *command: str, within_s: float = 600, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command of this machine that uses the daemon."""
        return subprocess.run(
            command, env={**self.env, **env}, capture_output=True, text=True, timeout=within_s, check=False
        )

    def docker(self, *arguments: str, within_s: float = 600, **env: str) -> str:
        """Run a command of docker, which must succeed. Returns its output and messages."""
        done = self.run("docker", *arguments, within_s=within_s, **env)
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"docker {arguments}: {done.returncode}\n{output[-6000:]}\n{self.log()}"
        return output

    def hpcdist(
        self, *arguments: str, cwd: Path, within_s: float = 600, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `hpcdist ARGUMENTS` on this machine."""
        command = [sys.executable, "-m", "hpcdist", *arguments]
        return subprocess.run(
            command, env={**self.env, **env}, cwd=cwd, capture_output=True, text=True, timeout=within_s, check=False
        )

    def inspect(self, name: str, kind: Literal["container", "image"] = "container") -> dict[str, Any]:
        done = self.run("docker", kind, "inspect", name)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)[0]
        return found

    def has(self, image: str) -> bool:
        return self.run("docker", "image", "inspect", image).returncode == 0

    def in_its_network(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the daemon's network namespace, where ports are published."""
        return self.run("nsenter", f"--net=/proc/{self.pid}/ns/net", *command)

    def log(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-10:])


def missing_docker() -> str | None:
    """Return the reason why no daemon can run on this machine; None if it can."""
    if os.getuid() != 0:
        return "a docker daemon needs root"
    path = _path(os.environ)
    missing = [
        name for name in ("dockerd", "docker", "containerd", "runc", "ip") if shutil.which(name, path=path) is None
    ]
    if not missing and not PLUGINS.is_dir():  # the client of Debian 12 has none
        missing = [
            f"docker {name}"
            for name in ("buildx", "compose")
            if subprocess.run(["docker", name, "version"], capture_output=True, check=False).returncode != 0
        ]
    if missing:
        return f"{', '.join(missing)} not installed: bash scripts/runtimes/docker.sh"
    return None


@contextmanager
def docker_box(folder: Path, network: Network, *, store: Path = STORE) -> Iterator[DockerBox]:
    """Start a daemon and end it, with all its containers, after the block or if this process is killed."""
    store.mkdir(parents=True, exist_ok=True, mode=0o711)
    # Not a folder of pytest: its path may be too long for a socket.
    place = Path("/run", f"hpcdist-docker-{secrets.token_hex(4)}")
    (place / "cgroups").mkdir(parents=True)
    place.chmod(0o755)
    env = {
        **os.environ,
        "PATH": _path(os.environ),
        "DOCKER_HOST": f"unix://{place}/docker.sock",
        "DOCKER_CONFIG": str(folder),
        # Otherwise colours and moving lines in the output of a build.
        "BUILDKIT_PROGRESS": "plain",
    }
    _add_plugins(folder)
    guard = Guard()
    try:
        with (store / "lock").open("w") as lock:  # one daemon at a time can use the store
            fcntl.flock(lock, fcntl.LOCK_EX)
            process = guard.start(_command(place, store, network), env=env, cwd=folder, output=folder / "log")
            daemon = None
            try:
                box = DockerBox(folder, env, 0)
                wait_for(lambda: _answers(box, process), "the docker daemon to answer", timeout_s=120)
                (daemon,) = psutil.Process(process.pid).children()
                yield DockerBox(folder, env, daemon.pid)
            finally:
                if daemon is not None:
                    with suppress(psutil.NoSuchProcess):
                        daemon.send_signal(signal.SIGTERM)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(60)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                guard.forget(process.pid)
    finally:
        guard.close()
        shutil.rmtree(place, ignore_errors=True)


def _answers(box: DockerBox, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, f"dockerd ended with code {process.returncode}\n{box.log()}"
    return box.run("docker", "version").returncode == 0


def _command(place: Path, store: Path, network: Network) -> list[str]:
    """Return the argv of a daemon in namespaces of its own."""
    namespaces = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]
    options = [f"--host=unix://{place}/docker.sock", f"--data-root={store}/data", f"--exec-root={place}/exec"]
    options += [f"--pidfile={place}/pid", "--storage-driver=overlay2"]
    # Root of a container cannot raise limits, which docker does for its containers.
    options += [f"--add-runtime=within-limits={RUNC}", "--default-runtime=within-limits"]
    if network == "host":
        options += ["--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
    else:
        namespaces.append("--net")
        options += ["--bip=172.31.255.1/24", "--default-address-pool=base=172.31.0.0/17,size=24", "--ip6tables=false"]
    return [*namespaces, "sh", "-c", _IN_NAMESPACES, "sh", network, str(place), "dockerd", *options]


def _add_plugins(config: Path) -> None:
    """Make buildx and compose of Debian sid known to the client, which looks for them in the user's configuration."""
    for plugin in sorted(PLUGINS.glob("docker-*")):
        link = config / "cli-plugins" / plugin.name
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(plugin)


def _path(env: Mapping[str, str]) -> str:
    return f"{SID}/usr/sbin:{SID}/usr/bin:{env['PATH']}" if (SID / "usr/sbin/dockerd").exists() else env["PATH"]


# --- Tests with a real docker daemon: builds with BuildKit, the README's command, restarts, and docker/compose.yaml

pytestmark = pytest.mark.timeout(2400)

REQUIRE_CONTAINERS = "HPCDIST_REQUIRE_CONTAINERS"
TRUSTING_BASE = "localhost/debian-base-trusting:bookworm"
POSTGRES = "localhost/postgres-for-tests"
CERTIFICATES = Path("/usr/local/share/ca-certificates")
USER = f"{UNKNOWN_UID}:{UNKNOWN_UID}"
#: The README's flags without `--gpus all`.
FLAGS = ("--ipc=host", "--ulimit", "memlock=-1", "--user", USER)
TRAIN = ("run", "ddp_digits", "launch.num_ranks=2", "tracking.system_interval_s=0")
CODE = ("--volume", f"{CHECKOUT}/tests/support/user_code:/work:ro")
#: The address of the daemon's bridge, by which containers and other machines would reach a port.
OTHER_ADDRESS = "172.31.255.1"


@pytest.fixture(scope="module")
def box(containers: Containers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerBox]:
    """Build all images with a daemon on this machine's network, and yield one with bridges of its own."""
    if (reason := missing_docker()) is not None:
        if os.environ.get(REQUIRE_CONTAINERS) == "1":
            pytest.fail(f"{REQUIRE_CONTAINERS}=1, but {reason}")
        pytest.skip(reason)
    with docker_box(tmp_path_factory.mktemp("builder"), "host") as builder:
        _add_base(builder, containers, tmp_path_factory.mktemp("base"))
        context = CHECKOUT / "tests" / "support" / "postgres_image"
        builder.docker("build", "--network=host", f"--build-arg=BASE_IMAGE={BASE}", "--tag", POSTGRES, str(context))
        for target in ("default", "slim", "mlflow"):
            _build(builder, target, tmp_path_factory.mktemp("secrets"), containers.canary)
        builder.docker("image", "prune", "--force")  # images of earlier sessions, without a name by now
    with docker_box(tmp_path_factory.mktemp("box"), "own") as found:
        yield found


def _add_base(builder: DockerBox, containers: Containers, context: Path) -> None:
    """Copy the base image from podman, and add this machine's own certificate authorities."""
    if not builder.has(BASE):
        with subprocess.Popen(["podman", "save", BASE], env=containers.env, stdout=subprocess.PIPE) as saved:
            subprocess.run(["docker", "load"], env=builder.env, stdin=saved.stdout, check=True)
    certificates = sorted(CERTIFICATES.glob("*.crt"))
    for certificate in certificates:
        shutil.copy(certificate, context)
    lines = [f"FROM {BASE}", *([f"COPY *.crt {CERTIFICATES}/", "RUN update-ca-certificates"] if certificates else [])]
    (context / "Dockerfile").write_text("\n".join(lines) + "\n")
    builder.docker("build", "--network=host", "--tag", TRUSTING_BASE, str(context))


def _build(builder: DockerBox, target: str, folder: Path, canary: str) -> None:
    write_index_secrets(folder, canary)
    options = ["--network=host", *(f"--secret=id={name},src={folder / name}" for name in ("pip.conf", "uv.toml"))]
    command = ["image", "build", "--engine", "docker", "--base", TRUSTING_BASE, "--target", target]
    command += [f"--option={option}" for option in options]
    done = builder.hpcdist(*command, cwd=CHECKOUT, within_s=1800)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}\n{builder.log()}"


@pytest.fixture(scope="module")
def control_runs(box: DockerBox, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train without disturbance, with the README's command; return the folder of runs."""
    folder = tmp_path_factory.mktemp("control")
    os.chown(folder, UNKNOWN_UID, UNKNOWN_UID)
    output = box.docker("run", "--rm", *FLAGS, f"--volume={folder}:/runs", "hpcdist", *TRAIN, "stop.max_epochs=2")
    assert output.strip().splitlines()[-1].startswith("finished: trained 46 steps"), output
    return folder


@pytest.fixture(scope="module")
def control(control_runs: Path) -> str:
    """Return the hash of the weights of the undisturbed run."""
    return weights_hash(only_run(control_runs))


@pytest.mark.faults
def test_image_check_passes_with_docker(box: DockerBox, tmp_path: Path) -> None:
    done = box.hpcdist("image", "check", "hpcdist:slim", "--engine", "docker", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"^ok +([^:]+): (.+)$", done.stdout, re.MULTILINE))
    labels = box.inspect("hpcdist:slim", "image")["Config"]["Labels"]
    assert labels["hpcdist.base.id"] == box.inspect(TRUSTING_BASE, "image")["Id"]
    assert found["training on 2 ranks"].startswith("finished: trained 20 steps")


@pytest.mark.faults
def test_command_of_the_readme_trains_as_the_caller(control_runs: Path) -> None:
    owners = {(path.lstat().st_uid, path.lstat().st_gid) for path in control_runs.rglob("*")}
    assert owners == {(UNKNOWN_UID, UNKNOWN_UID)}, "all files belong to the caller"


@pytest.mark.faults
def test_docker_stop_saves_and_docker_start_continues(box: DockerBox, control: str, runs: Path) -> None:
    held = ("stop.max_epochs=2", "trainer=gated:train", "params.hold_at=30")
    name = f"stopped-{os.getpid()}"
    box.docker("run", "--detach", "--name", name, *FLAGS, *CODE, f"--volume={runs}:/runs", "hpcdist", *TRAIN, *held)
    try:
        wait_for(lambda: list(runs.glob("*/*/attempts/001/held-0")), "rank 0 is held", timeout_s=300)
        box.docker("stop", "--time", "120", name)
        assert box.inspect(name)["State"]["ExitCode"] == 0
        assert "stopped: everything saved (SIGTERM to the supervisor)" in box.docker("logs", name)
        assert only_run(runs).read_state().status == "stopped"
        box.docker("start", name)
        assert box.docker("wait", name).strip() == "0"
        assert "continuing run" in box.docker("logs", name)
        assert (only_run(runs).read_state().status, only_run(runs).read_state().attempt) == ("finished", 2)
        assert weights_hash(only_run(runs)) == control
    finally:
        box.run("docker", "rm", "--force", name)


@pytest.mark.faults
def test_restart_policy_continues_after_the_container_was_killed(box: DockerBox, control: str, runs: Path) -> None:
    """The kernel ends all processes of a container when its process 1 dies; docker then starts it again."""
    held = ("stop.max_epochs=2", "checkpoint.every_steps=20", "trainer=gated:train", "params.hold_at=30")
    name = f"killed-{os.getpid()}"
    box.docker(
        "run", "--detach", "--name", name, "--restart=on-failure:3", *FLAGS, *CODE, f"--volume={runs}:/runs",
        "hpcdist", *TRAIN, *held,
    )  # fmt: skip
    try:
        wait_for(lambda: list(runs.glob("*/*/attempts/001/held-0")), "rank 0 is held", timeout_s=300)
        pid = box.inspect(name)["State"]["Pid"]
        # Process ids in the answer are those of the daemon's namespace.
        box.run("nsenter", f"--target={box.pid}", "--pid", "--mount", "kill", "-KILL", str(pid))
        wait_for(lambda: box.inspect(name)["RestartCount"] == 1, "docker restarts the container", timeout_s=120)
        assert box.docker("wait", name).strip() == "0"
        state = only_run(runs).read_state()
        assert (state.status, state.attempt) == ("finished", 2)
        assert weights_hash(only_run(runs)).split()[1] == control.split()[1]
    finally:
        box.run("docker", "rm", "--force", name)


@pytest.mark.faults
def test_run_in_docker_records_the_image(box: DockerBox, tmp_path: Path) -> None:
    command = (*TRAIN, "stop.max_epochs=1", "name=first", "--in", "docker")
    done = box.hpcdist(*command, cwd=tmp_path, HPCDIST_RUNS_DIR=str(tmp_path / "runs"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert last_lines(done)[-1].startswith("finished: trained 23 steps")
    facts = json.loads(only_run(tmp_path / "runs").environment.read_text())
    assert (facts["image"], facts["image_digest"]) == ("hpcdist", box.inspect("hpcdist", "image")["Id"])


# --- compose: MLflow, PostgreSQL and training
class Project:
    """docker/compose.yaml in a checkout of its own, for a user that is not root."""

    def __init__(self, box: DockerBox, folder: Path) -> None:
        self.box = box
        self.folder = folder
        self._command = ["docker", "compose", "--file", str(folder / "docker" / "compose.yaml")]

    def compose(self, *arguments: str, within_s: float = 900) -> str:
        """Run `docker compose ARGUMENTS`, which must succeed. Returns its output and messages."""
        done = self.box.run(*self._command, *arguments, within_s=within_s, POSTGRES_IMAGE=POSTGRES)
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"compose {arguments}: {done.returncode}\n{output[-6000:]}\n{self.box.log()}"
        return output

    def secret(self, name: str) -> str:
        return (self.folder / "docker" / "secrets" / name).read_text()

    def container(self, service: str) -> str:
        return self.compose("ps", "--all", "--quiet", service).strip()

    def status(self, path: str, user: str = "", password: str = "", address: str = "127.0.0.1") -> str:
        """Return the status code of a request to the published port, or the name of the error."""
        token = base64.b64encode(f"{user}:{password}".encode()).decode()
        code = (
            "import sys, urllib.error, urllib.request as u\n"
            "headers = {'Authorization': 'Basic ' + sys.argv[2]} if sys.argv[2] else {}\n"
            "request = u.Request(sys.argv[1], headers=headers)\n"
            "try: print(u.urlopen(request, timeout=30).status)\n"
            "except urllib.error.HTTPError as error: print(error.code)\n"
            "except OSError as error: print(type(error).__name__)\n"
        )
        uri = f"http://{address}:5000{path}"
        done = self.box.in_its_network(sys.executable, "-c", code, uri, token if user else "")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def project(box: DockerBox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Start the server and its database, and remove them with their volumes after the tests."""
    folder = tmp_path_factory.mktemp("compose")
    shutil.copytree(CHECKOUT / "docker", folder / "docker", ignore=shutil.ignore_patterns("secrets", ".env"))
    for path in (folder, *folder.rglob("*")):
        os.chown(path, UNKNOWN_UID, UNKNOWN_UID)
    for parent in folder.parents[:3]:  # pytest's folders are closed for other users
        parent.chmod(parent.stat().st_mode | 0o001)
    init = ["setpriv", f"--reuid={UNKNOWN_UID}", f"--regid={UNKNOWN_UID}", "--clear-groups", "bash"]
    subprocess.run([*init, str(folder / "docker" / "compose-init.sh")], check=True, capture_output=True)
    found = Project(box, folder)
    try:
        found.compose("up", "--detach", "--wait", "--wait-timeout", "600", "mlflow")
        yield found
    finally:
        found.compose("--profile", "train-cpu", "--profile", "train", "down", "--volumes", "--timeout", "10")


@pytest.mark.faults
def test_published_port_requires_the_password_and_is_local(project: Project) -> None:
    path = "/api/2.0/mlflow/experiments/search?max_results=5"
    assert project.status("/health") == "200"
    assert project.status(path) == "401"
    assert project.status(path, "admin", "wrong") == "401"
    assert project.status(path, "admin", project.secret("admin_password")) == "200"
    assert project.status("/health", address=OTHER_ADDRESS) == "URLError", "published on 127.0.0.1 only"


@pytest.mark.faults
def test_services_are_healthy_and_show_no_secret(project: Project) -> None:
    services = {service: project.box.inspect(project.container(service)) for service in ("db", "mlflow")}
    assert {found["State"]["Health"]["Status"] for found in services.values()} == {"healthy"}
    assert services["mlflow"]["Config"]["User"] == USER
    public = json.dumps(services) + project.compose("top") + project.compose("logs")
    names = ("db_password", "admin_password", "train_password", "flask_key")
    assert not [name for name in names if project.secret(name) in public]


@pytest.mark.faults
def test_training_logs_to_the_server(project: Project) -> None:
    output = project.compose(
        "--profile", "train-cpu", "run", "--rm", "train-cpu", "run", "ddp_digits", "stop.max_epochs=1",
        "launch.num_ranks=2",
    )  # fmt: skip
    assert "finished: trained 23 steps" in output
    run = only_run(project.folder / "runs")
    assert run.path.stat().st_uid == UNKNOWN_UID
    ids = json.loads(run.mlflow.read_text())
    path = f"/api/2.0/mlflow/runs/get?run_id={ids['run_id']}"
    assert project.status(path, "hpcdist", project.secret("train_password")) == "200"
    assert project.container("mlflow-users")
    code = project.box.inspect(project.container("mlflow-users"))["State"]["ExitCode"]
    assert code == 0


@pytest.mark.faults
def test_killed_server_and_database_restart_with_their_data(project: Project) -> None:
    for service in ("db", "mlflow"):
        container = project.container(service)
        pid = project.box.inspect(container)["State"]["Pid"]
        kill = ["nsenter", f"--target={project.box.pid}", "--pid", "--mount", "kill", f"-{signal.SIGKILL}", str(pid)]
        assert project.box.run(*kill).returncode == 0

        def is_back(container: str = container) -> bool:
            found = project.box.inspect(container)
            return bool(found["RestartCount"] >= 1 and found["State"].get("Health", {}).get("Status") == "healthy")

        wait_for(is_back, f"docker restarts {service}", timeout_s=600)
    path = "/api/2.0/mlflow/users/get?username=hpcdist"
    assert project.status(path, "admin", project.secret("admin_password")) == "200"


# --- docker/compose.yaml as podman-compose reads it: ports, secrets and dependencies.


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of docker/ after compose-init.sh."""
    folder = tmp_path_factory.mktemp("compose")
    shutil.copytree(CHECKOUT / "docker", folder / "docker", ignore=shutil.ignore_patterns("secrets", ".env"))
    subprocess.run(["bash", folder / "docker" / "compose-init.sh"], check=True, capture_output=True, umask=0o022)
    return folder


@pytest.fixture(scope="module")
def services(checkout: Path) -> dict[str, Any]:
    """Return the services with substituted variables."""
    command = [sys.executable, "-m", "podman_compose", "--file", str(checkout / "docker" / "compose.yaml")]
    profiles = ["--profile", "train", "--profile", "train-cpu"]
    done = subprocess.run([*command, *profiles, "config"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return found


def test_ports_are_published_on_this_machine_alone(services: dict[str, Any]) -> None:
    assert sorted(services) == ["db", "mlflow", "mlflow-users", "train", "train-cpu"]
    published = [str(port) for service in services.values() for port in service.get("ports", [])]
    assert published == ["127.0.0.1:5000:5000"]
    assert not [name for name, service in services.items() if service.get("network_mode") == "host"]


def test_secrets_are_private_files_each_for_its_service(services: dict[str, Any], checkout: Path) -> None:
    files = {path.name: path for path in (checkout / "docker" / "secrets").iterdir()}
    assert sorted(files) == ["admin_password", "db_password", "flask_key", "mlflow_credentials", "train_password"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o600}
    texts = {name: path.read_text() for name, path in files.items()}
    assert len({*texts.values()}) == 5
    configuration = yaml.safe_dump(services)
    assert not [name for name, text in texts.items() if text in configuration]
    for name in ("train", "train-cpu"):
        (secret,) = services[name]["secrets"]
        assert (secret["source"], secret["target"]) == ("mlflow_credentials", "/home/hpcdist/.mlflow/credentials")
    assert texts["mlflow_credentials"] == (
        f"[mlflow]\nmlflow_tracking_username = hpcdist\nmlflow_tracking_password = {texts['train_password']}\n"
    )
    assert services["mlflow-users"]["secrets"] == ["admin_password", "train_password"]
    for name in ("mlflow", "mlflow-users", "train", "train-cpu"):
        assert services[name]["user"] == f"{os.getuid()}:{os.getgid()}"
    subprocess.run(["bash", checkout / "docker" / "compose-init.sh"], check=True, capture_output=True)
    assert texts == {name: path.read_text() for name, path in files.items()}, "a second start keeps them"
