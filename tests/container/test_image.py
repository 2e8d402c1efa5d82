"""Tests of the images on one machine: training, stop and resume, owners of files, contents of layers."""

import json
import os
import re
import secrets
import sqlite3
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import runtime_cases
from containers import (
    BASE,
    RUNTIMES,
    SMALL_NAME,
    UNKNOWN_UID,
    Containers,
    last_lines,
    mismatch,
    mount_flags,
    only_run,
    small_image,
)

import hpcdist
from hpcdist.host.json_files import read_json

BuildImage = Callable[[str], str]
pytestmark = pytest.mark.timeout(1200)
#: The flags of the README's command that need neither a GPU nor the permission to raise limits.
FLAGS = ("--ipc=host", "--user", f"{UNKNOWN_UID}:{UNKNOWN_UID}")
SBOM = "/usr/share/doc/hpcdist/sbom.cdx.json"
TRAIN = ("run", "ddp_digits", "launch.num_ranks=2", "tracking.system_interval_s=0")


def test_image_check_passes(containers: Containers, image: BuildImage, tmp_path: Path) -> None:
    done = containers.hpcdist("image", "check", image("default"), "--engine", "podman", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"^ok +([^:]+): (.+)$", done.stdout, re.MULTILINE))
    assert found["entrypoint"] == "tini -- hpcdist"
    assert found["user"] == "1000:1000"
    assert re.fullmatch(rf"\d{{3,}} components in {SBOM}", found["bill of materials"])
    assert found["training on 2 ranks"].startswith("finished: trained 20 steps")
    assert found["digest"] == f"sha256:{containers.inspect(image('default'))['Id']}"
    load = "import ctypes; [ctypes.CDLL(f'lib{name}.so.1') for name in ('ibverbs', 'rdmacm', 'numa')]"
    containers.podman("run", "--rm", "--entrypoint", "python3", image("default"), "-c", load)


def test_image_has_labels_and_an_unprivileged_user(containers: Containers, image: BuildImage) -> None:
    config = containers.inspect(image("default"))["Config"]
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in config["Labels"].items()}
    assert labels["title"] == "hpcdist"
    assert labels["version"] == hpcdist.__version__
    assert labels["base.name"] == BASE
    assert labels["base.digest"] == "", "a local image has no registry digest"
    assert labels["hpcdist.base.id"] == f"sha256:{containers.inspect(BASE)['Id']}"
    assert labels["licenses"] == "Apache-2.0"
    assert config["User"] == "1000:1000"


@pytest.mark.parametrize(
    ("target", "package"), [("default", "torch"), pytest.param("mlflow", "mlflow", marks=pytest.mark.slow)]
)
def test_bill_of_materials_lists_all_installed_packages(
    containers: Containers, image: BuildImage, target: str, package: str
) -> None:
    name = image(target)
    components = json.loads(containers.podman("run", "--rm", "--entrypoint", "cat", name, SBOM))["components"]
    # hpcdist is installed from a file and has no package URL.
    listed = [item.get("purl", item["name"]).partition("?")[0] for item in components]
    shell = ("run", "--rm", "--entrypoint", "sh", name, "-c")
    version = f"import importlib.metadata as m; print(m.version('{package}'), len(list(m.distributions())))"
    libc = "dpkg-query --show --showformat '${Version} ' libc6; dpkg-query --show | wc -l"
    python, num_python, libc, num_debian, *opt = containers.podman(
        *shell, f'python3 -c "{version}"; {libc}; ls /opt'
    ).split()
    assert f"pkg:pypi/{package}@{python.replace('+', '%2B')}" in listed
    assert f"pkg:deb/debian/libc6@{libc.replace('+', '%2B')}" in listed
    assert len([entry for entry in listed if not entry.startswith("pkg:deb/")]) == int(num_python)
    # The bill also contains the source packages.
    assert len([entry for entry in listed if entry.startswith("pkg:deb/")]) >= int(num_debian)
    assert opt == ["hpcdist" if target == "default" else "mlflow"], "the image does not contain the tools"


def test_run_in_podman_trains_and_records_the_image_digest(
    containers: Containers, image: BuildImage, tmp_path: Path
) -> None:
    name = image("default")
    command = (*TRAIN, "stop.max_epochs=1", "name=first", "--in", "podman", "--image", name)
    done = containers.hpcdist(*command, cwd=tmp_path, env={"HPCDIST_RUNS_DIR": str(tmp_path / "runs")})
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
    with sqlite3.connect(tmp_path / "runs" / "mlflow.db") as database:
        tags = dict(database.execute("select key, value from tags"))
    assert tags["hpcdist.image_digest"] == digest
    assert re.fullmatch("[0-9a-f]{64}", tags["hpcdist.image_build"])
    assert tags["hpcdist.image_base"] == f"sha256:{containers.inspect(BASE)['Id']}"


def test_folder_without_write_access_is_an_error_with_the_fix(
    containers: Containers, image: BuildImage, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    folder.mkdir(mode=0o755)
    done = containers.try_podman("run", "--rm", *FLAGS, "--volume", f"{folder}:/runs", image("default"), *TRAIN)
    assert done.returncode == 2
    assert "(Permission denied): set `runs_dir` to a folder that you can write" in last_lines(done)[-1]
    assert "--user $(id -u):$(id -g)" in last_lines(done)[-1]
    assert list(folder.iterdir()) == []


# --- layers


def layers(containers: Containers, image: str) -> Iterator[Path]:
    """Yield the folders of an image's layers except those of its base."""
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


@pytest.mark.parametrize(
    "target", ["default", *(pytest.param(target, marks=pytest.mark.slow) for target in ("slim", "mlflow"))]
)
def test_layers_contain_no_secrets_caches_or_git_folders(
    containers: Containers, image: BuildImage, target: str
) -> None:
    name = image(target)
    canary = containers.canary.encode()
    num_files = 0
    for layer in layers(containers, name):
        for folder, _, names in os.walk(layer):
            for file in (Path(folder) / name for name in names):
                inside = str(file.relative_to(layer))
                status = file.lstat()
                num_files += 1
                # An empty file is the mount point of a secret during the build.
                if status.st_size and os.path.isfile(file) and not file.is_symlink():
                    assert not FORBIDDEN.search(inside), inside
                    if status.st_size < SMALL:
                        assert canary not in file.read_bytes(), inside
    assert num_files > 1000
    metadata = json.dumps(containers.inspect(name)) + containers.podman("history", "--no-trunc", name)
    assert containers.canary not in metadata


# --- `hpcdist image convert` with the real enroot and apptainer, which start what was written.


#: Of this process: another one that tests the same image counts containers, too, and removes the image at its end. As a
#: label, since podman would otherwise give both names to one image.
TAG = f"{SMALL_NAME}-converted-{secrets.token_hex(4)}"
#: Start a command in each format, with the checkout and its packages mounted, as in the matrix of runtimes.
STARTS: dict[str, Sequence[str]] = {
    "sif": ("apptainer", "exec", "--no-home", *mount_flags("apptainer"), "IMAGE"),
    "sqsh": ("enroot", "start", *mount_flags("enroot"), "IMAGE"),
    "dir": ("apptainer", "exec", "--no-home", *mount_flags("apptainer"), "IMAGE"),
}
CASES = {"sif": "apptainer-sif", "sqsh": "enroot-sqsh", "dir": "apptainer-folder"}


@pytest.fixture(scope="module")
def labelled(containers: Containers) -> Iterator[str]:
    """An image that names hpcdist's version and sets a variable, as `hpcdist image build` makes it."""
    image = small_image(containers)
    text = f"""
        FROM {image.name}
        LABEL org.opencontainers.image.title=hpcdist
        LABEL org.opencontainers.image.version={hpcdist.__version__}
        LABEL test={TAG}
        ENV OF_IMAGE=here
        CMD ["true"]
    """  # enroot does not import an image without a command
    command = ["podman", "build", "--isolation=chroot", f"--tag={TAG}", "-"]
    subprocess.run(command, env=containers.env, input=text, capture_output=True, text=True, check=True)
    yield TAG
    containers.podman("image", "rm", "--force", TAG)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All runtimes on PATH; returns the folder of their temporary files."""
    bins = ":".join(str(RUNTIMES / name / "bin") for name in ("apptainer", "enroot"))
    folder = tmp_path / "temporary"
    folder.mkdir()
    for name, value in {
        "PATH": f"{bins}:{os.environ['PATH']}",
        "TMPDIR": str(folder),
        **runtime_cases.apptainer_env(),
        **{f"ENROOT_{part}_PATH": str(tmp_path / "enroot") for part in ("DATA", "RUNTIME", "CACHE")},
        "ENROOT_LOGIN_SHELL": "no",
    }.items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.mark.parametrize("form", ["dir", *(pytest.param(form, marks=pytest.mark.slow) for form in ("sif", "sqsh"))])
def test_converted_image_starts(form: str, containers: Containers, labelled: str, tools: Path, tmp_path: Path) -> None:
    if (reason := mismatch() or runtime_cases.missing_program(CASES[form])) is not None:
        pytest.skip(reason)
    command = ("image", "convert", labelled, "--engine", "podman", "--to", form, "--into", "images")
    done = containers.hpcdist(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stem = f"hpcdist-{hpcdist.__version__}-{containers.inspect(labelled)['Id'][:12]}"
    name = stem if form == "dir" else f"{stem}.{form}"
    assert done.stdout == f"images/{name}\n"
    again = containers.hpcdist(*command, cwd=tmp_path)
    assert again.stdout == f"images/{name} exists already\n", again.stderr

    start = [str(tmp_path / "images" / name) if word == "IMAGE" else word for word in STARTS[form]]
    code = "import os, hpcdist, torch; print(hpcdist.__version__, os.environ['OF_IMAGE'])"
    ran = subprocess.run([*start, "python3", "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == f"{hpcdist.__version__} here\n", ran.stderr

    assert {path.name for path in (tmp_path / "images").iterdir()} == {name, f".{name}.lock"}
    assert list(tools.iterdir()) == []
    assert containers.podman("ps", "--all", "--quiet", f"--filter=ancestor={labelled}") == ""
