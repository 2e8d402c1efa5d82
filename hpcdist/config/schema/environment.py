"""The section `cluster.environment`: the Python environment of ranks on Slurm that run without a container."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcdist.config.schema.checks import at_least, one_line
from hpcdist.config.schema.paths import IS_PATH


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """The Python environment of the ranks of a submitted run. A copy of hpcdist is added to it."""

    kind: Literal["none", "venv", "uv", "module", "squashfs"] = "none"
    """Source of the environment; `none` starts ranks with the Python that runs hpcdist."""
    path: str = field(default="", metadata=IS_PATH)
    """A virtual environment (venv), a folder with a `uv.lock` (uv), or an image of an environment (squashfs)."""
    modules: list[str] = field(default_factory=list)
    """Modules to load for the ranks, such as `cuda/13.0`; with `kind: module` they contain the ranks' Python."""
    python: str = "python3"
    """Name of the Python, for an environment that has several, such as `python3.12`."""
    uv_args: list[str] = field(default_factory=list)
    """Additional options of `uv sync`, such as `--extra=train` or `--python=3.12`."""
    stage: bool = True
    """Copy the environment to each node's local disk; false uses a venv or uv environment from its shared folder."""
    local_dir: str = "/tmp"  # noqa: S108  # the copies are in a folder of the user's own
    """Folder on each node's local disk; variables of the job, such as `$SLURM_TMPDIR`, are expanded."""
    max_age_days: float = 14
    """Days without use after which copies on the nodes and packed environments in `runs_dir` are removed."""

    def problems(self, time_limit_min: int) -> list[str]:
        """Return the mistakes by key, which `ClusterConfig` reports.

        Args:
            time_limit_min: time limit of the job in minutes, for which its environment must not be removed.
        """
        shortest = time_limit_min / (24 * 60)
        return (
            at_least(self, shortest if self.kind != "none" else 0, "max_age_days", strictly=True)
            + one_line(self, "path", "modules", "python", "uv_args", "local_dir")
            + self._missing_keys()
            + [
                f"modules must hold names such as cuda/13.0, got {name!r}"
                for name in self.modules
                if not name or name.startswith("-")
            ]
            + ([f"python must be the name of a command, got {self.python!r}"] if "/" in self.python else [])
            + ([] if self.python else ["python must not be empty"])
            + (
                [f"local_dir must be an absolute path or begin with a variable, got {self.local_dir!r}"]
                if not self.local_dir.startswith(("/", "$"))
                else []
            )
        )

    def _missing_keys(self) -> list[str]:
        found = []
        if self.kind in ("venv", "uv", "squashfs") and not self.path:
            meaning = {"venv": "a virtual environment", "uv": "a folder with a uv.lock", "squashfs": "an image file"}
            found.append(f"path must name {meaning[self.kind]} for kind={self.kind}")
        if self.kind == "module" and not self.modules:
            found.append("modules must name the modules that contain Python for kind=module")
        if self.kind == "none" and self.modules:
            found.append("modules are not loaded with kind=none: set kind, or use cluster.setup")
        if self.kind == "squashfs" and not self.stage:
            found.append(
                "stage=false is not possible with kind=squashfs, which is unpacked on each node: set it to true"
            )
        if self.uv_args and self.kind != "uv":
            found.append(f"uv_args are options of `uv sync`, but kind={self.kind}: remove them, or set kind=uv")
        return found
