"""Podman for the container tests: a separate store, in which images are built from a copy of the code."""

import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from session_locks import lock_in_turn

from hpcdist.run.folder import RunDir

CHECKOUT = Path(__file__).resolve().parents[2]
#: Layers are kept for the next session: the first build takes minutes, later ones seconds. `make clean` removes them.
STORE = Path("/var/tmp/hpcdist-tests/containers")
#: Where the recipes of scripts/runtimes install, as in scripts/runtimes/installed.sh.
RUNTIMES = Path(os.environ.get("HPCDIST_TEST_RUNTIMES", STORE.parent / "runtimes"))
BASE = "localhost/debian-base:bookworm"
#: Part of the tags of images that contain the code: test sessions of several checkouts share the store.
CHECKOUT_ID = hashlib.sha256(bytes(CHECKOUT)).hexdigest()[:8]
TAGS = {
    "default": f"localhost/hpcdist:test-{CHECKOUT_ID}",
    "slim": f"localhost/hpcdist:test-slim-{CHECKOUT_ID}",
    "mlflow": f"localhost/hpcdist-mlflow:test-{CHECKOUT_ID}",
}
#: A user id that no image has.
UNKNOWN_UID = 1234


@dataclass(frozen=True)
class Containers:
    """A podman with its own store, apart from the images of this machine, and commands of hpcdist that use it."""

    folder: Path
    #: Text in the secret files of the package index and in all files of the checkout that a build must not read.
    canary: str = field(default_factory=lambda: f"canary-{secrets.token_hex(8)}")

    @property
    def env(self) -> dict[str, str]:
        return {
            **os.environ,
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
        }

    def configure(self) -> None:
        """Configure podman for machines with hybrid cgroups and fixed limits, such as another container."""
        STORE.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.folder / "containers.conf").write_text(
            textwrap.dedent(
                """\
                [engine]
                runtime = "runc"
                [containers]
                default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
                netns = "host"
                """
            )
        )
        (self.folder / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{STORE}/graph"\nrunroot = "{STORE}/run"\n'
        )

    def try_podman(self, *arguments: str, within_s: float = 400) -> subprocess.CompletedProcess[str]:
        command = ["podman", *arguments]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=within_s, check=False)

    def podman(self, *arguments: str, within_s: float = 400) -> str:
        done = self.try_podman(*arguments, within_s=within_s)
        assert done.returncode == 0, f"podman {arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def hpcdist(
        self, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, within_s: float = 600
    ) -> subprocess.CompletedProcess[str]:
        """Run `hpcdist ARGUMENTS`."""
        return subprocess.run(
            [sys.executable, "-m", "hpcdist", *arguments],
            env={**self.env, **(env or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )

    def inspect(self, image: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.podman("image", "inspect", image))[0]
        return found

    def has(self, image: str) -> bool:
        return self.try_podman("image", "exists", image).returncode == 0

    def make_base(self) -> None:
        """Build a Debian image with Python, if it is missing. Raises CalledProcessError without a network."""
        with self.locked("base"):
            if not self.has(BASE):
                self._make_base()

    def _make_base(self) -> None:
        root = self.folder / "rootfs"
        packages = "python3,python3-venv,ca-certificates"
        # In a new mount namespace: a killed debootstrap would leave /proc mounted in the folder.
        command = [
            "unshare",
            "--mount",
            "debootstrap",
            "--variant=minbase",
            f"--include={packages}",
            "bookworm",
            str(root),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
        if done.returncode != 0:  # a download can fail temporarily
            shutil.rmtree(root, ignore_errors=True)
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
        tar = ["tar", "-C", str(root), "--exclude=./var/cache/apt/archives/*", "-c", "."]
        with subprocess.Popen(tar, stdout=subprocess.PIPE) as packed:
            subprocess.run(["podman", "import", "-", BASE], env=self.env, stdin=packed.stdout, check=True)
        shutil.rmtree(root)

    @contextmanager
    def locked(self, what: str) -> Iterator[None]:
        """Lock what is made once for all tests: those in other processes wait and use it, too."""
        with (STORE / f"{what}.lock").open("w") as file:
            lock_in_turn(file)
            yield

    def build(self, target: str) -> str:
        """Build an image with `hpcdist image build`, from a checkout with files that must not get into the image."""
        with self.locked("images"):
            return self._build(target)

    def _build(self, target: str) -> str:
        checkout = self.folder / "checkout"
        if not checkout.exists():
            _copy_checkout(checkout, self.canary)
            write_index_secrets(self.folder, self.canary)
        engine = ["--isolation=chroot", "--network=host", "--volume=/etc/ssl/certs:/etc/ssl/certs:ro"]
        engine += [f"--secret=id={name},src={self.folder / name}" for name in ("pip.conf", "uv.toml")]
        options = [word for option in engine for word in ("--option", option)]
        words = ["image", "build", "--engine", "podman", "--base", BASE, "--target", target, "--tag", TAGS[target]]
        done = self.hpcdist(*words, *options, cwd=checkout, within_s=900)
        if done.returncode != 0:  # a download can fail temporarily; the layers so far are kept
            done = self.hpcdist(*words, *options, cwd=checkout, within_s=900)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return TAGS[target]


def missing_requirement(containers: Containers) -> str | None:
    """Return the reason why containers cannot run on this machine; None if they can."""
    if os.getuid() != 0:
        return "the container tests need root, for debootstrap and podman's overlays"
    missing = [name for name in ("podman", "runc", "debootstrap") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: scripts/test_packages.sh does it"
    containers.configure()
    try:
        containers.make_base()
    except subprocess.CalledProcessError as error:
        lines = f"{error.stdout or ''}{error.stderr or ''}".strip().splitlines()
        why = next((line for line in lines if line.startswith("E: ")), lines[-1] if lines else str(error))
        return f"no base image can be made here: {why}"
    return None


def _copy_checkout(target: Path, canary: str) -> None:
    """Copy the tracked and untracked files, and add private files of a typical checkout."""
    listing = subprocess.run(
        ["git", "-C", CHECKOUT, "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listing.split("\0")):
        if (CHECKOUT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, target / name)
    private = ".git/config .env .netrc docker/.env docker/secrets/db_password runs/digits/first/config.yaml"
    for name in f"{private} .venv/pyvenv.cfg hpcdist/__pycache__/cli.cpython-311.pyc tests/token".split():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(canary)


def write_index_secrets(folder: Path, canary: str) -> None:
    """Write the package index of this machine for pip and uv, with a canary that no layer may contain."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found = {}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        found[key.rpartition(".")[2]] = value.strip("'\"").split()
    index = [url for url in found.get("index-url", []) if url.startswith("http")]
    more = [url for url in found.get("extra-index-url", []) if url.startswith("http")]
    pip = ["[global]", f"# {canary}", *(f"index-url = {url}" for url in index)]
    pip += [f"extra-index-url = {' '.join(more)}"] if more else []
    uv = [f"# {canary}", *(f'[[index]]\nurl = "{url}"\n' for url in more)]
    uv += [f'[[index]]\nurl = "{url}"\ndefault = true\n' for url in index]
    for name, lines in (("pip.conf", pip), ("uv.toml", uv)):
        path = folder / name
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o600)


def last_lines(done: subprocess.CompletedProcess[str]) -> Sequence[str]:
    return (done.stdout + done.stderr).strip().splitlines()


def only_run(runs: Path) -> RunDir:
    """Return the run in a folder of another user, which `find_runs` ignores."""
    (found,) = runs.glob("*/*/state.json")
    return RunDir(found.parent)


def weights_hash(run: RunDir) -> str:
    """Return the step and the hash of the newest checkpoint's model."""
    newest = max((run.path / "checkpoints").glob("step-*"))
    return f"{newest.name} {hashlib.sha256((newest / 'model.pt').read_bytes()).hexdigest()}"


# --- A small image for the matrix of container runtimes: Debian with Python, in every form that a runtime starts.
# torch and hpcdist are not in it: /opt/packages and /opt/checkout are mount points for those of this machine. So it is
# built in seconds, and a change of the code needs no new image.

#: Kept for the next session, like podman's layers.
SMALL_FOLDER = STORE.parent / "small-image"
SMALL_NAME = "localhost/hpcdist-small:test"
#: Python of Debian 12, the base image.
SMALL_PYTHON = (3, 11)
#: Python reads this file at its start and so finds what is mounted.
_PTH = "import site; site.addsitedir('/opt/checkout'); site.addsitedir('/opt/packages')\n"
#: Changes with every change of the content, so that images of older checkouts are not used.
SMALL_VERSION = "2"


@dataclass(frozen=True)
class SmallImage:
    containers: Containers
    name: str = SMALL_NAME  #: in podman's store

    @property
    def folder(self) -> Path:
        return SMALL_FOLDER / f"rootfs-{SMALL_VERSION}"

    @property
    def sqsh(self) -> Path:
        options = ["-comp", "zstd", "-Xcompression-level", "3", "-noappend", "-quiet", "-no-progress"]
        # An ordinary user cannot unpack device files, which images of a registry do not have.
        return self._file("no-devices.sqsh", ["mksquashfs", str(self.folder)], [*options, "-wildcards", "-e", "dev/*"])

    def sif(self, apptainer: str) -> Path:
        """Return the image for apptainer; `apptainer` is the path of the program."""
        quick = ["--mksquashfs-args", "-comp gzip -Xcompression-level 1"]
        return self._file("sif", [apptainer, "--quiet", "build", "--force", *quick], [str(self.folder)])

    def _file(self, suffix: str, before: Sequence[str], after: Sequence[str]) -> Path:
        """Return a form of the image, which `BEFORE FILE AFTER` writes on first use."""
        path = SMALL_FOLDER / f"small-{SMALL_VERSION}.{suffix}"
        with self.containers.locked("small"):
            if not path.exists():
                partial = path.with_name(f"partial-{path.name}")
                partial.unlink(missing_ok=True)
                _checked([*before, str(partial), *after])
                partial.chmod(0o644)
                partial.rename(path)
        return path


def mismatch() -> str | None:
    """Return the reason why packages of this Python cannot be used in the image; None if they can."""
    here = sys.version_info[:2]
    return None if here == SMALL_PYTHON else f"the test image has Python {SMALL_PYTHON}, this one is {here}"


def mount_flags(runtime: str) -> list[str]:
    """Return the flags (`container.extra_args`) by which the image gets hpcdist and its packages.

    `container.mounts` would not do: the check of the image starts it without mounts.
    """
    sources = {"/opt/checkout": str(CHECKOUT), "/opt/packages": sysconfig.get_path("purelib")}
    pairs = [(source, target) for target, source in sources.items()]
    if runtime == "pyxis":
        return [f"--container-mounts={','.join(f'{source}:{target}:ro' for source, target in pairs)}"]
    form = {
        "apptainer": "--bind={}:{}:ro",
        "enroot": "--mount={}:{}:none:x-create=auto,rbind,ro",
    }[runtime]
    return [form.format(*pair) for pair in pairs]


def small_image(containers: Containers) -> SmallImage:
    """Return the image as a folder and in podman's store; other forms are made on first use."""
    image = SmallImage(containers)
    with containers.locked("small"):
        if not image.folder.exists():
            _unpack(containers, image.folder)
        if not containers.has(f"{SMALL_NAME}-{SMALL_VERSION}"):
            with subprocess.Popen(["tar", "-C", str(image.folder), "-c", "."], stdout=subprocess.PIPE) as packed:
                command = ["podman", "import", "-", f"{SMALL_NAME}-{SMALL_VERSION}"]
                subprocess.run(command, env=containers.env, stdin=packed.stdout, capture_output=True, check=True)
    return SmallImage(containers, f"{SMALL_NAME}-{SMALL_VERSION}")


def _unpack(containers: Containers, folder: Path) -> None:
    """Unpack the base image and add the mount points."""
    partial = folder.with_name(f"partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    container = containers.podman("create", BASE, "true").strip()
    try:
        command = ["podman", "export", container]
        with subprocess.Popen(command, env=containers.env, stdout=subprocess.PIPE) as exported:
            subprocess.run(["tar", "-C", str(partial), "-x"], stdin=exported.stdout, check=True)
    finally:
        containers.podman("rm", "--force", container)
    for unused in ("usr/share/doc", "usr/share/locale", "usr/share/man", "var/lib/apt/lists"):
        shutil.rmtree(partial / unused)
    for mount_point in ("opt/checkout", "opt/packages"):
        (partial / mount_point).mkdir()
    (partial / "usr/lib/python3/dist-packages/mounted.pth").write_text(_PTH)
    for path in (SMALL_FOLDER, partial):
        path.chmod(0o755)
    partial.rename(folder)


def _checked(command: Sequence[str]) -> None:
    env = {**os.environ, "APPTAINER_DROP_CAPS": "CAP_SYS_RESOURCE"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}"
