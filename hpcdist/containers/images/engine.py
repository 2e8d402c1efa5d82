"""The program that builds and starts images here: docker, podman or buildah."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpcdist.errors import ImageError, UserMistake

EngineName = Literal["docker", "podman", "buildah"]
#: Those that can start a container the way a person does; buildah builds only.
RUNNERS: tuple[EngineName, ...] = ("docker", "podman")
#: A daemon that takes longer is of no use.
ANSWER_S = 30.0


@dataclass(frozen=True)
class Engine:
    name: EngineName

    def output(self, *arguments: str) -> str:
        """Standard output of a command. Raises ImageError with the last line that it complains in."""
        done = subprocess.run([self.name, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ImageError(f"`{self.name} {' '.join(arguments[:2])}` failed: {last_line(done.stderr)}")
        return done.stdout


def find_engine(wanted: str | None, among: Sequence[EngineName]) -> Engine:
    """The engine that a user asks for, or the first one that works here.

    Raises UserMistake, with what is wrong with each, when there is none.
    """
    if wanted is not None and wanted not in among:
        raise UserMistake(f"{wanted!r} cannot do this; choose one of {', '.join(among)}")
    candidates = [name for name in among if wanted in (None, name)]
    complaints = []
    for name in candidates:
        complaint = _complaint(name)
        if complaint is None:
            return Engine(name)
        complaints.append(f"{name} {complaint}")
    raise UserMistake(f"no container engine to use here: {'; '.join(complaints)}")


def _complaint(name: EngineName) -> str | None:
    """Why an engine does not work here; None when it does."""
    if shutil.which(name) is None:
        return "is not installed"
    # docker's client answers without its daemon; what the server says is what counts. The others have none, and
    # would wait for their store, which is closed for minutes while a build writes a large layer.
    ask = [name, "version", "--format", "{{.Server.Version}}"] if name == "docker" else [name, "--version"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, check=False, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        return "does not answer"
    return f"is installed, but says: {last_line(done.stderr)}" if done.returncode else None


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "nothing more"
