"""Generator of the reference of environment variables."""

from __future__ import annotations

import re
from collections import defaultdict

import yaml

from generators.tables import PACKAGE, ROOT, cell, code, table

VARIABLE = re.compile(r"(?<![A-Z0-9_])HPCDIST_[A-Z][A-Z0-9_]*[A-Z0-9]\b")
#: Files outside the package that read or set environment variables for users.
OTHER_SOURCES = ("docker/Dockerfile", "docker/compose-init.sh", "slurm/run.sbatch")


def used_variables() -> dict[str, set[str]]:
    """Return the files that use each `HPCDIST_*` variable, by its name."""
    sources = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".sh")]
    found: dict[str, set[str]] = defaultdict(set)
    for path in [*sources, *(ROOT / name for name in OTHER_SOURCES)]:
        for name in VARIABLE.findall(path.read_text()):
            found[name].add(str(path.relative_to(ROOT)))
    return found


def environment_variables() -> str:
    """Return one table of variables per audience.

    Raises:
        RuntimeError: environment.yml lacks a variable of the code, or describes one that the code does not use.
    """
    described: dict[str, dict[str, str]] = yaml.safe_load((ROOT / "docs/reference/environment.yml").read_text())
    used = used_variables()
    own = {name for group in described.values() for name in group if name.startswith("HPCDIST_")}
    if missing := set(used) - own:
        raise RuntimeError(f"docs/reference/environment.yml has no description of {sorted(missing)}")
    if stale := own - set(used):
        raise RuntimeError(f"docs/reference/environment.yml describes unused variables {sorted(stale)}")
    parts = []
    for title, group in described.items():
        rows = [
            (code(name), cell(text), ", ".join(code(path) for path in sorted(used.get(name, ()))))
            for name, text in group.items()
        ]
        parts.append(f"## {title}\n\n{table(('variable', 'meaning', 'used in'), rows)}")
    return "\n\n".join(parts)
