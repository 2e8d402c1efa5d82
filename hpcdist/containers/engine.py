"""The container engine of this machine, docker or podman, as a program that is called."""

import shutil
import subprocess
from dataclasses import dataclass
from typing import Literal, get_args

from hpcdist.errors import ImageError, UserMistake
from hpcdist.host.time_limits import last_line, run_within

EngineName = Literal["docker", "podman"]
#: Limit for the first answer of the engine, because a daemon may hang.
ANSWER_S = 30.0
#: Last line of tar after an error; the reason is in a line before it.
_TAR_SUMMARY = "Exiting with failure status due to previous errors"


@dataclass(frozen=True)
class Engine:
    name: EngineName

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command of the engine and return its exit code and output."""
        return subprocess.run(
            [self.name, *arguments], input=stdin, capture_output=True, text=True, errors="replace", check=False
        )

    def output(self, *arguments: str) -> str:
        """Return the output of a command of the engine. Raises ImageError if it fails."""
        done = self.run(*arguments)
        if done.returncode:
            raise ImageError(f"`{self.name} {' '.join(arguments[:2])}` failed: {error_line(done.stderr)}")
        return done.stdout

    def is_rootless_daemon(self) -> bool:
        """Return whether this is docker with a daemon of an ordinary user, who is root in its containers."""
        if self.name != "docker":
            return False
        return "name=rootless" in self.run("info", "--format", "{{.SecurityOptions}}").stdout


def find_engine(requested: str | None) -> Engine:
    """Return an engine that works here: the requested one, by default the first. Raises UserMistake if none does."""
    problems = []
    for name in get_args(EngineName):
        if requested not in (None, name):
            continue
        problem = _problem(name)
        if not problem:
            return Engine(name)
        problems.append(problem)
    if requested is not None:
        for other in get_args(EngineName):
            if other != requested and not _problem(other):
                raise UserMistake(f"{problems[0]}: choose {other} instead, which works here")
    raise UserMistake(f"no container engine to use here: {'; '.join(problems)}")


def _problem(name: EngineName) -> str:
    """Return why an engine cannot be used here; empty if it can."""
    if shutil.which(name) is None:
        return f"{name} is not installed"
    # podman has no daemon, and commands on its store would block for minutes while a build writes a large layer.
    command = [name, "--version"]
    if name == "docker":
        # docker's client prints its own version without the daemon, so the server's version is requested.
        command = [name, "version", "--format", "{{.Server.Version}}"]
    done = run_within(command, ANSWER_S)
    if done.returncode:
        return f"{name} is installed, but fails: {error_line(done.stderr)}"
    return ""


def error_line(stderr: str) -> str:
    """Return the last line of a command's standard error that gives a reason; tar's summary gives none."""
    lines = [line for line in stderr.splitlines() if not line.endswith(_TAR_SUMMARY)]
    return last_line("\n".join(lines), limit_chars=1000) or "no error message"
