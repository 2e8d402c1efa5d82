"""Folders of this machine that a container shows."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hpcdist.errors import UserMistake

#: Characters that separate the parts of a mount on command lines, which paths therefore cannot contain.
UNMOUNTABLE = ":,"


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A folder or file of this machine, `source`, at the path `target` of a container."""

    source: str
    target: str
    read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `SOURCE`, `SOURCE:TARGET` or `SOURCE:TARGET:ro`; the config's validation has accepted the text."""
        source, *rest = text.split(":")
        target = next((word for word in rest if word not in ("ro", "rw")), source)
        return cls(source=source, target=target, read_only="ro" in rest)

    def text(self, read_only: str = ":ro", read_write: str = "") -> str:
        """Return the mount as an argument of a runtime, which ends with one of the two words for the mode."""
        mode = read_only if self.read_only else read_write
        return f"{self.source}:{self.target}{mode}"

    def covers(self, other: "Mount") -> bool:
        """Return whether this mount already shows the other one at the same path and in the same mode."""
        source = Path(other.source)
        if other.read_only != self.read_only or not source.is_relative_to(self.source):
            return False
        return Path(self.target) / source.relative_to(self.source) == Path(other.target)


def without_nested(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
    """Remove mounts that another one covers: some runtimes cannot mount below a mount.

    Raises UserMistake for a path that runtimes cannot mount.
    """
    kept: list[Mount] = []
    for mount in sorted(mounts, key=lambda mount: (len(Path(mount.target).parts), mount.target)):
        if set(UNMOUNTABLE) & set(mount.source + mount.target):
            raise UserMistake(f"container: {mount.source} cannot be mounted: runtimes allow no ':' or ',' in a path")
        if not any(other.covers(mount) for other in kept):
            kept.append(mount)
    return tuple(kept)
