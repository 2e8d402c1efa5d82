"""Generators of the troubleshooting page: known failures, reasons of waiting jobs, findings of preflight and doctor."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from generators.messages import template
from generators.tables import PACKAGE, cell, code, folded, table
from hpcdist.review.explain import PATTERNS, WAITING

#: The functions of hpcdist.host.machine that create findings.
FUNCTIONS = ("Check", "note", "warning", "failure")
#: The modules in hpcdist/checks whose findings are about the nodes of a job; some of them are doctor's as well.
PREFLIGHT = ("node_facts.py", "node_links.py", "preflight.py")


def failure_patterns() -> str:
    """Return a section per failure that `hpcdist explain` recognises."""
    parts = []
    for pattern in PATTERNS:
        # Alternatives are separated by `|` outside parentheses.
        texts = "\n".join(re.split(r"\|(?![^()]*\))", pattern.texts))
        cause = pattern.cause.replace("{0}", "…")
        searched = folded("searched texts", f"```text\n{texts}\n```")
        parts.append(f"### {pattern.name}\n\n**Cause:** {cause}.\n\n**Fix:** {pattern.fix}.\n\n{searched}\n")
    return "\n".join(parts)


def waiting_reasons() -> str:
    """Return Slurm's reasons for a waiting job."""
    rows = [(code(reason), cell(cause), cell(fix)) for reason, (cause, fix) in WAITING.items()]
    return table(("Slurm's reason", "cause", "fix"), rows)


def preflight_findings() -> str:
    return _findings([PACKAGE / "checks" / name for name in PREFLIGHT])


def doctor_findings() -> str:
    return _findings(path for path in (PACKAGE / "checks").glob("*.py") if path.name not in PREFLIGHT)


def _findings(modules: Iterable[Path]) -> str:
    """Return the findings that modules create, without those of level `ok`."""
    rows = []
    for path in sorted(modules):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in FUNCTIONS:
                continue
            arguments = [*zip(("name", "text", "fix"), node.args, strict=False)]
            arguments += [(keyword.arg or "", keyword.value) for keyword in node.keywords]
            given = {name: _text(value, tree) for name, value in arguments}
            if given.get("text") and given.get("level") != "ok":
                rows.append((cell(given["name"]), code(given["text"]), cell(given.get("fix", ""))))
    return folded(f"{len(rows)} findings", table(("check", "finding", "fix"), rows))


def _text(node: ast.expr, tree: ast.Module) -> str:
    """Return the text of an argument; of a variable, the text that the lines before assign to it, or a constant's."""
    if not isinstance(node, ast.Name):
        return template(node)
    lines = range(node.lineno - 12, node.lineno + 1)
    texts = [
        (line, template(value))
        for line, name, value in _assignments(tree)
        if name == node.id and (line in lines or name.isupper()) and template(value)
    ]
    return max([(0, ""), *texts])[1]


def _assignments(tree: ast.Module) -> Iterator[tuple[int, str, ast.expr]]:
    """Yield (line, variable, value) of each assignment; a tuple yields its elements."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                yield from ((node.lineno, ast.unparse(t), v) for t, v in zip(target.elts, value.elts, strict=True))
            else:
                yield node.lineno, ast.unparse(target), value
