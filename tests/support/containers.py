"""Podman as the container tests use it: with a store of its own, and our images built in it from a copy of the code."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcdist.run.folder import RunDir

CHECKOUT = Path(__file__).resolve().parents[2]
#: Layers stay here for the next session: the first one takes minutes, the others seconds. `make clean` removes them.
STORE = Path("/var/tmp/hpcdist-tests/containers")
BASE = "localhost/debian-base:bookworm"
DEFAULT, SLIM, MLFLOW = "localhost/hpcdist:test", "localhost/hpcdist:test-slim", "localhost/hpcdist-mlflow:test"
TAGS = {"default": DEFAULT, "slim": SLIM, "mlflow": MLFLOW}
#: Somebody whom no image knows.
UNKNOWN_UID = 1234


@dataclass(frozen=True)
class Containers:
    """A podman that does not meddle with this machine's own images, and hpcdist that uses it."""

    folder: Path
    #: Stands in the package index's secret files and in everything of the checkout that a build must not see.
    canary: str = field(default_factory=lambda: f"canary-{secrets.token_hex(8)}")

    @property
    def env(self) -> dict[str, str]:
        return {
            **os.environ,
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
        }

    def configure(self) -> None:
        """Runs where cgroups are hybrid and limits cannot be raised, as in another container."""
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
        """Our command line, as a user on this machine calls it."""
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
        """A Debian with Python, as a registry's would be. Raises CalledProcessError without a network."""
        with self.locked():
            if not self.has(BASE):
                self._make_base()

    def _make_base(self) -> None:
        root = self.folder / "rootfs"
        packages = "python3,python3-venv,ca-certificates"
        # In a mount namespace of its own: killed in the middle, debootstrap would leave /proc mounted in there.
        command = [
            "unshare",
            "--mount",
            "debootstrap",
            "--variant=minbase",
            f"--include={packages}",
            "bookworm",
            str(root),
        ]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        tar = ["tar", "-C", str(root), "--exclude=./var/cache/apt/archives/*", "-c", "."]
        with subprocess.Popen(tar, stdout=subprocess.PIPE) as packed:
            subprocess.run(["podman", "import", "-", BASE], env=self.env, stdin=packed.stdout, check=True)
        shutil.rmtree(root)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store for a build: tests in another process wait, and find its layers."""
        with (STORE / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def build(self, target: str) -> str:
        """Build one of our images with our own command, from a checkout full of what must stay outside."""
        with self.locked():
            return self._build(target)

    def _build(self, target: str) -> str:
        checkout = self.folder / "checkout"
        if not checkout.exists():
            _copy_checkout(checkout, self.canary)
            _write_index_secrets(self.folder, self.canary)
        engine = ["--isolation=chroot", "--network=host", "--volume=/etc/ssl/certs:/etc/ssl/certs:ro"]
        engine += [f"--secret=id={name},src={self.folder / name}" for name in ("pip.conf", "uv.toml")]
        options = [word for option in engine for word in ("--option", option)]
        words = ["image", "build", "--engine", "podman", "--base", BASE, "--target", target, "--tag", TAGS[target]]
        done = self.hpcdist(*words, *options, cwd=checkout, within_s=900)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return TAGS[target]


def missing_requirement(containers: Containers) -> str | None:
    """Why there can be no containers here; None where there can."""
    if os.getuid() != 0:
        return "the container tests need root, for debootstrap and podman's overlays"
    missing = [name for name in ("podman", "runc", "debootstrap") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: scripts/test_packages.sh does it"
    containers.configure()
    try:
        containers.make_base()
    except subprocess.CalledProcessError as error:
        said = f"{error.stdout or ''}{error.stderr or ''}".strip().splitlines()
        why = next((line for line in said if line.startswith("E: ")), said[-1] if said else str(error))
        return f"no base image can be made here: {why}"
    return None


def _copy_checkout(target: Path, canary: str) -> None:
    """What git knows or would take in, and beside it what people have lying around."""
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
    lying_around = (
        ".git/config",
        ".env",
        ".netrc",
        "docker/.env",
        "docker/secrets/db_password",
        "runs/digits/first/config.yaml",
        ".venv/pyvenv.cfg",
        "hpcdist/__pycache__/cli.cpython-311.pyc",
        "tests/token",
    )
    for name in lying_around:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(canary)


def _write_index_secrets(folder: Path, canary: str) -> None:
    """This machine's package index, for pip and for uv, with a canary that no layer may hold."""
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


def runs_of_other_users(folder: Path) -> list[RunDir]:
    """The runs in a folder of another user, which `find_runs` leaves out."""
    return [RunDir(path.parent) for path in sorted(folder.glob("*/*/state.json"))]


def last_lines(done: subprocess.CompletedProcess[str]) -> Sequence[str]:
    return (done.stdout + done.stderr).strip().splitlines()
