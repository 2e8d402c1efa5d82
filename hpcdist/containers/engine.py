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
_TAR_SUMMARY = "Exiting with failure status due to previous errors"


@dataclass(frozen=True)
class Engine:
    name: EngineName

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.name, *arguments], input=stdin, capture_output=True, text=True, errors="replace", check=False
        )

    def output(self, *arguments: str) -> str:
        done = self.run(*arguments)
        if done.returncode:
            raise ImageError(f"`{self.name} {' '.join(arguments[:2])}` failed: {error_line(done.stderr)}")
        return done.stdout

    def is_rootless_daemon(self) -> bool:
        """Return whether this is docker with a daemon of an ordinary user, who is root in its containers."""
        return self.name == "docker" and "name=rootless" in self.run("info", "--format", "{{.SecurityOptions}}").stdout


def find_engine(requested: str | None) -> Engine:
    """Return an engine that works here: the requested one, by default the first."""
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
    # docker's client answers without its daemon, so the server's version is requested. podman has no daemon, and
    # commands on its store would block for minutes while a build writes a large layer.
    asked = ["version", "--format", "{{.Server.Version}}"] if name == "docker" else ["--version"]
    done = run_within([name, *asked], ANSWER_S)
    if done.returncode:
        return f"{name} is installed, but fails: {error_line(done.stderr)}"
    return ""


def error_line(stderr: str) -> str:
    """Return the last line of a command's standard error that gives a reason: tar ends with one that does not."""
    lines = [line for line in stderr.splitlines() if not line.endswith(_TAR_SUMMARY)]
    return last_line("\n".join(lines), limit_chars=1000) or "no error message"
