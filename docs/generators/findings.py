"""Generators of the troubleshooting page: known failures, reasons of waiting jobs, findings of preflight and doctor.

The text and the fix of a finding stand in the call that creates it, or above the call in variables. A table of all
findings, which the checks would fill in, would separate a text from the values in it and from the condition for it. So
these generators read the calls, and each value becomes its name in braces. A variable that may have several texts at a
call is refused: each text has a call of its own.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module

from generators.messages import has_words, placeholder, template
from generators.tables import PACKAGE, cell, code, folded, table
from hpcdist.review.known_failures import PATTERNS
from hpcdist.review.pending_job import WAITING

#: The functions of hpcdist.host.check_result that create findings, without that of results without a problem.
FUNCTIONS = ("Check", "note", "warning", "failure")
#: The modules with findings about the nodes of a job; some of them are doctor's as well.
PREFLIGHT = (
    "hpcdist.checks.node_facts",
    "hpcdist.checks.node_links",
    "hpcdist.checks.preflight",
    "hpcdist.job.preflight_step",
)


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
    """Return the findings about the nodes of a job."""
    return _findings(PREFLIGHT)


def doctor_findings() -> str:
    """Return the other findings of `hpcdist doctor`."""
    modules = [f"hpcdist.checks.{path.stem}" for path in sorted((PACKAGE / "checks").glob("*.py"))]
    return _findings(name for name in modules if name not in PREFLIGHT)


def _findings(modules: Iterable[str]) -> str:
    """Return a foldable table of the findings that modules create."""
    rows: dict[tuple[str, ...], None] = {}  # each once
    for name in modules:
        module = import_module(name)
        constants = {name: value for name, value in vars(module).items() if isinstance(value, str)}
        for finding in findings_in(ast.parse(inspect.getsource(module)), constants):
            rows[finding] = None
    return folded(f"{len(rows)} findings", table(("check", "finding", "fix"), rows))


#: The text of each variable at a place of the code, by its name: empty if it is known only at run time.
Texts = Mapping[str, str]


def findings_in(tree: ast.Module, constants: Texts) -> Iterator[tuple[str, str, str]]:
    """Yield check, text and fix of the findings that a module creates, as cells of a table.

    Findings are left out if text and fix are known only at run time, as for an error.
    """
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for call, texts in _calls(function.body, constants):
            arguments = dict(zip(("name", "text", "fix"), call.args, strict=False))
            arguments |= {keyword.arg or "": keyword.value for keyword in call.keywords}
            name = template(arguments["name"], texts) or placeholder(arguments["name"])
            text = _text_of(arguments["text"], texts)
            fix = ""
            if "fix" in arguments:
                fix = _text_of(arguments["fix"], texts)
            if has_words(text + fix):
                yield cell(name), code(text), cell(fix)


def _calls(block: Iterable[ast.stmt], texts: Texts) -> Iterator[tuple[ast.Call, Texts]]:
    """Yield the calls in a block that create findings, and the texts of the variables there.

    Args:
        texts: of the variables before the block.
    """
    known = dict(texts)
    for statement in block:
        if isinstance(statement, ast.FunctionDef):
            continue  # a function of its own
        inner_blocks = _blocks(statement)
        for inner_block in inner_blocks:
            yield from _calls(inner_block, known)
        if not inner_blocks:
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in FUNCTIONS:
                    yield node, known
        for name in _assigned(statement):
            known.pop(name, None)
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                known[name] = template(value, known)
            case ast.Assign(targets=[ast.Tuple()]):
                known |= dict.fromkeys(_assigned(statement), "")


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """Return the blocks of a compound statement; none for a simple one."""
    parts = [statement, *getattr(statement, "handlers", []), *getattr(statement, "cases", [])]
    blocks = [getattr(part, name, []) for part in parts for name in ("body", "orelse", "finalbody")]
    return [block for block in blocks if block]


def _assigned(statement: ast.stmt) -> set[str]:
    """Return the variables that a statement assigns, or one in its blocks."""
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def _text_of(argument: ast.expr, texts: Texts) -> str:
    """Return the text of an argument, or its name in braces if the text is known only at run time.

    Raises ValueError for a variable that has different texts on different ways to the call.
    """
    if isinstance(argument, ast.Name) and argument.id not in texts:
        raise ValueError(f"line {argument.lineno}: {argument.id} may have several texts: call once for each of them")
    return template(argument, texts) or placeholder(argument)
