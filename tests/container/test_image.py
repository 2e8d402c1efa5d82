"""Our images as a person uses them on one machine: train, stop, go on; who owns the files; what is in the layers."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from containers import BASE, CHECKOUT, UNKNOWN_UID, Containers, last_lines, runs_of_other_users
from hpcdist_runs import wait_for

from hpcdist.files.atomic import read_json
from hpcdist.run.folder import RunDir

#: The first test to ask for an image builds it.
pytestmark = pytest.mark.timeout(1200)
BuildImage = Callable[[str], str]
#: The flags of README's line that need no GPU and no right to raise limits.
LINE = ("--ipc=host", "--user", f"{UNKNOWN_UID}:{UNKNOWN_UID}")
TRAIN = ("run", "ddp_digits", "launch.num_ranks=2", "tracking.system_interval_s=0")


def only_run(runs: Path) -> RunDir:
    (found,) = runs_of_other_users(runs)
    return found


def weights_hash(run: RunDir) -> str:
    """Of the newest checkpoint's model, as its manifest has it and the file is."""
    newest = max((run.path / "checkpoints").glob("step-*"))
    return f"{newest.name} {hashlib.sha256((newest / 'model.pt').read_bytes()).hexdigest()}"


def test_check_finds_everything_in_place(containers: Containers, image: BuildImage, tmp_path: Path) -> None:
    done = containers.hpcdist("image", "check", image("default"), "--engine", "podman", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"^ok +([^:]+): (.+)$", done.stdout, re.MULTILINE))
    assert found["entrypoint"] == "tini -- hpcdist"
    assert found["user"] == "uid 1000"
    assert found["base"] == f"{BASE} sha256:{containers.inspect(BASE)['Id']}"
    assert re.fullmatch(r"\d{3,} components, `hpcdist image sbom` prints it", found["bill of materials"])
    assert found["RDMA"] == "libibverbs.so.1, librdmacm.so.1, libnuma.so.1, numactl"
    assert found["torch.compile"] == "can be used"
    assert found["training on 2 ranks"].startswith("finished: trained 20 steps")
    assert found["digest"] == f"sha256:{containers.inspect(image('default'))['Id']}"


def test_the_image_says_what_it_is(containers: Containers, image: BuildImage) -> None:
    import hpcdist

    config = containers.inspect(image("default"))["Config"]
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in config["Labels"].items()}
    assert labels["title"] == "hpcdist"
    assert labels["version"] == hpcdist.__version__
    assert labels["base.name"] == BASE
    assert labels["base.digest"] == "", "a local image has none"
    assert labels["hpcdist.base.id"] == f"sha256:{containers.inspect(BASE)['Id']}"
    assert labels["licenses"] == "Apache-2.0"
    assert config["User"] == "1000:1000"


@pytest.mark.parametrize(("target", "package"), [("default", "torch"), ("mlflow", "mlflow")])
def test_the_bill_of_materials_lists_what_is_installed(
    containers: Containers, image: BuildImage, tmp_path: Path, target: str, package: str
) -> None:
    name = image(target)
    done = containers.hpcdist("image", "sbom", name, "--engine", "podman", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    components = json.loads(done.stdout)["components"]
    # hpcdist itself, installed from a file, has no address in an index.
    listed = [item.get("purl", item["name"]).partition("?")[0] for item in components]
    look = ("run", "--rm", "--entrypoint", "sh", name, "-c")
    version = f"import importlib.metadata as m; print(m.version('{package}'), len(list(m.distributions())))"
    libc = "dpkg-query --show --showformat '${Version} ' libc6; dpkg-query --show | wc -l"
    python, num_python, libc, num_debian, *opt = containers.podman(
        *look, f'python3 -c "{version}"; {libc}; ls /opt'
    ).split()
    assert f"pkg:pypi/{package}@{python.replace('+', '%2B')}" in listed
    assert f"pkg:deb/debian/libc6@{libc.replace('+', '%2B')}" in listed
    assert len([entry for entry in listed if not entry.startswith("pkg:deb/")]) == int(num_python)
    # Besides those that are installed, it names the source packages that they are built from.
    assert len([entry for entry in listed if entry.startswith("pkg:deb/")]) >= int(num_debian)
    assert opt == ["hpcdist" if target == "default" else "mlflow"], "the tools stay out of the image"


def test_run_in_podman_trains_and_tells_mlflow_the_digest(
    containers: Containers, image: BuildImage, tmp_path: Path
) -> None:
    name = image("default")
    words = (*TRAIN, "stop.max_epochs=1", "name=boxed", "--in", "podman", "--image", name)
    done = containers.hpcdist(*words, cwd=tmp_path, env={"HPCDIST_RUNS_DIR": str(tmp_path / "runs")})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU is visible: training on CPUs" in done.stdout
    assert last_lines(done)[-1].startswith("finished: trained 23 steps")
    line = next(line for line in done.stdout.splitlines() if line.startswith("podman run "))
    assert f"--volume={tmp_path}/runs:{tmp_path}/runs" in line
    run = only_run(tmp_path / "runs")
    assert run.read_state().status == "finished"
    facts = read_json(run.environment) or {}
    digest = f"sha256:{containers.inspect(name)['Id']}"
    assert (facts["image"], facts["image_digest"]) == (name, digest)
    import sqlite3

    with sqlite3.connect(tmp_path / "runs" / "mlflow.db") as database:
        tags = dict(database.execute("select key, value from tags"))
    assert tags["hpcdist.image_digest"] == digest
    assert re.fullmatch("[0-9a-f]{64}", tags["hpcdist.image_build"])
    assert tags["hpcdist.image_base"] == f"sha256:{containers.inspect(BASE)['Id']}"


def test_a_stopped_container_goes_on_when_it_is_started_again(
    containers: Containers, image: BuildImage, runs: Path, tmp_path: Path
) -> None:
    """SIGTERM as `docker stop` sends it, at step 30; the same line again ends with an undisturbed run's weights."""
    held = (*TRAIN, "stop.max_epochs=2", "trainer=gated:train", "params.hold_at=30")
    name = f"hpcdist-test-{os.getpid()}"
    code = ("--volume", f"{CHECKOUT}/tests/support/user_code:/work:ro")
    line = ("run", "--rm", "--name", name, *LINE, *code, "--volume", f"{runs}:/runs", image("default"), *held)
    with started(containers, *line) as first:
        wait_for(lambda: list(runs.glob("*/*/attempts/001/held-0")), "rank 0 is held", timeout_s=120)
        containers.podman("stop", "--time", "60", name)
        output = first.communicate(timeout=60)[0]
    assert first.returncode == 0, output
    assert "stopped: stopped with everything saved (SIGTERM to the supervisor)" in output
    stopped = only_run(runs)
    assert stopped.read_state().status == "stopped"
    assert len(list((stopped.path / "checkpoints").glob("step-*"))) >= 1

    again = containers.podman(*line)
    assert f"continuing run {stopped.name}, which has the same config" in again
    assert only_run(runs).read_state().status == "finished"
    assert only_run(runs).read_state().attempt == 2

    control = tmp_path / "control"
    control.mkdir()
    os.chown(control, UNKNOWN_UID, UNKNOWN_UID)
    containers.podman(
        "run", "--rm", *LINE, "--volume", f"{control}:/runs", image("default"), *TRAIN, "stop.max_epochs=2"
    )
    assert weights_hash(only_run(runs)) == weights_hash(only_run(control))

    owners = {(path.lstat().st_uid, path.lstat().st_gid) for path in runs.rglob("*")}
    assert owners == {(UNKNOWN_UID, UNKNOWN_UID)}


def started(containers: Containers, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["podman", *arguments], env=containers.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_without_a_place_to_write_it_says_how_to_start(
    containers: Containers, image: BuildImage, tmp_path: Path
) -> None:
    folder = tmp_path / "roots"
    folder.mkdir(mode=0o755)
    done = containers.try_podman("run", "--rm", *LINE, "--volume", f"{folder}:/runs", image("default"), *TRAIN)
    assert done.returncode == 2
    assert "(Permission denied): set `runs_dir` to a folder that you can write" in last_lines(done)[-1]
    assert "--user $(id -u):$(id -g)" in last_lines(done)[-1]
    assert list(folder.iterdir()) == []


@pytest.mark.faults
def test_compile_works_in_the_default_image(containers: Containers, image: BuildImage, runs: Path) -> None:
    command = (*TRAIN, "model.compile=true", "stop.max_steps=2", "launch.num_ranks=1")
    done = containers.podman("run", "--rm", *LINE, "--volume", f"{runs}:/runs", image("default"), *command)
    assert "finished: trained 2 steps" in done


def test_compile_is_refused_in_the_slim_image(containers: Containers, image: BuildImage, runs: Path) -> None:
    command = (*TRAIN, "model.compile=true", "stop.max_steps=3")
    done = containers.try_podman("run", "--rm", *LINE, "--volume", f"{runs}:/runs", image("slim"), *command)
    assert done.returncode == 2
    assert last_lines(done)[-1] == (
        "hpcdist: model.compile=true needs a C++ compiler (g++) and Python's headers (Python.h), not found here:"
        " install g++ and libpython3-dev, use an image of the target `default` instead of `slim`,"
        " or set model.compile=false"
    )
    assert list(runs.iterdir()) == []


def test_an_image_of_somebody_else_is_refused(containers: Containers, image: BuildImage, tmp_path: Path) -> None:
    image("default")
    for wanted, complaint in {
        BASE: f"image {BASE} holds no hpcdist",
        "localhost/never-built": "podman has no image 'localhost/never-built': `hpcdist image build` makes one here",
    }.items():
        done = containers.hpcdist("run", "ddp_digits", "--in", "podman", "--image", wanted, cwd=tmp_path)
        assert done.returncode == 2
        (line,) = last_lines(done)
        assert line.startswith(f"hpcdist: {complaint}")
    assert list(tmp_path.iterdir()) == []


# --- layers


def layers(containers: Containers, image: str) -> Iterator[Path]:
    """The folders of an image's own layers, those of its base left out."""
    of_base = set(containers.inspect(BASE)["RootFS"]["Layers"])
    data = containers.inspect(image)["GraphDriver"]["Data"]
    folders = [data["UpperDir"], *filter(None, data.get("LowerDir", "").split(":"))]
    digests = containers.inspect(image)["RootFS"]["Layers"]
    for folder, digest in zip(reversed(folders), digests, strict=True):
        if digest not in of_base:
            yield Path(folder)


FORBIDDEN = re.compile(
    r"(^|/)(\.git|\.netrc|\.env|id_rsa|\.pypirc|\.venv)$|^root/\.(cache|config)/|^var/lib/apt/lists/.|"
    r"^var/cache/apt/archives/.*\.deb$|^tmp/.|\.whl\.tmp$|^etc/(pip\.conf|uv/uv\.toml)$"
)
SMALL = 2**20


@pytest.mark.parametrize("target", ["default", "slim", "mlflow"])
def test_no_secret_cache_or_git_in_any_layer(containers: Containers, image: BuildImage, target: str) -> None:
    name = image(target)
    canary = containers.canary.encode()
    num_files = 0
    for layer in layers(containers, name):
        for folder, _, names in os.walk(layer):
            for file in (Path(folder) / name for name in names):
                inside = str(file.relative_to(layer))
                status = file.lstat()
                num_files += 1
                # An empty file is where a secret was mounted while the layer was made.
                if status.st_size and os.path.isfile(file) and not file.is_symlink():
                    assert not FORBIDDEN.search(inside), inside
                    if status.st_size < SMALL:
                        assert canary not in file.read_bytes(), inside
    assert num_files > 1000
    described = json.dumps(containers.inspect(name)) + containers.podman("history", "--no-trunc", name)
    assert containers.canary not in described
