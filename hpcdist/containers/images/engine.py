"""The container engine of this machine: docker, podman or buildah."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpcdist.errors import ImageError, UserMistake
from hpcdist.machine.timed_command import last_line

EngineName = Literal["docker", "podman", "buildah"]
#: Engines that can run containers; buildah only builds images.
RUNNERS: tuple[EngineName, ...] = ("docker", "podman")
#: Limit for the first answer of the engine, because a daemon may hang.
ANSWER_S = 30.0
_TAR_SUMMARY = "Exiting with failure status due to previous errors"


@dataclass(frozen=True)
class Engine:
    """The commands of podman or docker."""

    name: EngineName

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command of the engine, which may fail."""
        return subprocess.run(
            [self.name, *arguments], input=stdin, capture_output=True, text=True, errors="replace", check=False
        )

    def output(self, *arguments: str) -> str:
        """Run a command of the engine and return its standard output. Raises ImageError with its last error line."""
        done = self.run(*arguments)
        if done.returncode:
            raise ImageError(f"`{self.name} {' '.join(arguments[:2])}` failed: {error_line(done.stderr)}")
        return done.stdout

    def is_rootless_daemon(self) -> bool:
        """Return whether this is docker with a daemon of an ordinary user, who is root in its containers."""
        if self.name != "docker":
            return False
        return "name=rootless" in self.run("info", "--format", "{{.SecurityOptions}}").stdout


def find_engine(requested: str | None, among: Sequence[EngineName]) -> Engine:
    """Return the requested engine, or the first one that works on this machine.

    Raises:
        UserMistake: no engine works; the message has the problem of each.
    """
    if requested is not None and requested not in among:
        raise UserMistake(f"{requested!r} cannot do this; choose one of {', '.join(among)}")
    candidates = [name for name in among if requested in (None, name)]
    problems = []
    for name in candidates:
        problem = _engine_problem(name)
        if problem is None:
            return Engine(name)
        problems.append(f"{name} {problem}")
    raise UserMistake(f"no container engine to use here: {'; '.join(problems)}")


def _engine_problem(name: EngineName) -> str | None:
    """Return why an engine does not work on this machine; None if it works."""
    if shutil.which(name) is None:
        return "is not installed"
    # docker's client answers without its daemon, so the server's version is requested. The others have no daemon, and
    # commands on their store would block for minutes while a build writes a large layer.
    command = [name, "version", "--format", "{{.Server.Version}}"] if name == "docker" else [name, "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        return "does not answer"
    return f"is installed, but fails: {error_line(done.stderr)}" if done.returncode else None


def error_line(stderr: str) -> str:
    """Return the last line of a command's standard error that gives a reason: tar ends with one that does not."""
    lines = [line for line in stderr.splitlines() if not line.endswith(_TAR_SUMMARY)]
    return last_line("\n".join(lines), limit_chars=1000) or "no error message"
