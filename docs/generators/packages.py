"""Generators of the list of packages and of the layout of a run folder."""

from __future__ import annotations

import ast

from generators.tables import PACKAGE, ROOT, cell, code, table
from hpcdist.run import folder


def run_folder() -> str:
    """Return the layout of a run folder, from the documentation of the module that defines it."""
    lines = [line for line in (folder.__doc__ or "").splitlines()[1:] if line.startswith("    ") or not line]
    return "```text\n" + "\n".join(line.removeprefix("    ") for line in lines).strip("\n") + "\n```"


def packages() -> str:
    """Return the packages and modules of hpcdist with the first paragraph of their documentation."""
    rows = []
    for path in sorted(PACKAGE.iterdir()):
        source = path / "__init__.py" if path.is_dir() else path
        if source.exists() and source.suffix == ".py" and not path.name.startswith("__"):
            text = ast.get_docstring(ast.parse(source.read_text())) or ""
            name = f"{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}"
            rows.append((code(name), cell(text.split("\n\n")[0])))
    return table(("package", "content"), rows)
