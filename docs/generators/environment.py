"""Generator of the reference of environment variables."""

from __future__ import annotations

import re

import yaml

from generators.tables import PACKAGE, ROOT, cell, code, table

VARIABLE = re.compile(r"(?<![A-Z0-9_])HPCDIST_[A-Z][A-Z0-9_]*[A-Z0-9]\b")
#: Files outside the package that read or set environment variables for users.
OTHER_SOURCES = ("docker/Dockerfile", "docker/compose-init.sh", "slurm/run.sbatch")


def used_variables() -> set[str]:
    """Return the names of all `HPCDIST_*` variables of the code."""
    sources = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".sh")]
    files = [*sources, *(ROOT / name for name in OTHER_SOURCES)]
    return {name for path in files for name in VARIABLE.findall(path.read_text())}


def environment_variables() -> str:
    """Return one table of variables per audience.

    Raises:
        RuntimeError: environment.yml lacks a variable of the code, or describes one that the code does not use.
    """
    described: dict[str, dict[str, str]] = yaml.safe_load((ROOT / "docs/reference/environment.yml").read_text())
    used = used_variables()
    own = {name for group in described.values() for name in group if name.startswith("HPCDIST_")}
    if missing := used - own:
        raise RuntimeError(f"docs/reference/environment.yml has no description of {sorted(missing)}")
    if stale := own - used:
        raise RuntimeError(f"docs/reference/environment.yml describes unused variables {sorted(stale)}")
    parts = []
    for title, group in described.items():
        rows = [(code(name), cell(text)) for name, text in group.items()]
        parts.append(f"## {title}\n\n{table(('variable', 'meaning'), rows)}")
    return "\n\n".join(parts)
