"""Generators of the troubleshooting page: known failures, reasons of waiting jobs, findings of preflight and doctor."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterable, Iterator, Mapping
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
        for call, texts in _calls_with_texts(ast.parse(path.read_text())):
            arguments = [*zip(("name", "text", "fix"), call.args, strict=False)]
            arguments += [(keyword.arg or "", keyword.value) for keyword in call.keywords]
            given = {name: _text(value, texts) for name, value in arguments}
            if given.get("text") and given.get("level") != "ok":
                rows.append((cell(given["name"]), code(given["text"]), cell(given.get("fix", ""))))
    rows = list(dict.fromkeys(rows))
    return folded(f"{len(rows)} findings", table(("check", "finding", "fix"), rows))


#: The string that each variable has at a place of the code, by its name.
Texts = Mapping[str, str]


def _calls_with_texts(module: ast.Module) -> list[tuple[ast.Call, Texts]]:
    """Return the calls that create findings, once for each way through the code that leads to them."""
    calls: list[tuple[ast.Call, Texts]] = []
    constants = _follow([node for node in module.body if isinstance(node, ast.Assign)], [{}], calls)
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            _follow(node.body, constants, calls)
    return calls


def _follow(body: Iterable[ast.stmt], ways: list[Texts], calls: list[tuple[ast.Call, Texts]]) -> list[Texts]:
    """Add the calls of statements to `calls`. Returns the texts at their end, one entry for each way through them.

    Args:
        ways: the texts before the first statement, one entry for each way that leads to it.
    """
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            continue  # it is followed by itself
        branches = _branches(statement)
        for node in _own_nodes(statement):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in FUNCTIONS:
                calls += [(node, texts) for texts in ways]
        if isinstance(statement, ast.Return | ast.Raise | ast.Continue | ast.Break):
            return []
        ways = [_after(statement, texts) for texts in ways]
        if branches:
            ends = [texts for branch in branches for texts in _follow(branch, ways, calls)]
            # Ways with the same texts are one: without this, their number doubles with each branch.
            ways = list({tuple(sorted(texts.items())): texts for texts in ends}.values())
    return ways


def _branches(statement: ast.stmt) -> list[list[ast.stmt]]:
    """Return the blocks of a statement, one of which is executed; none for a simple statement."""
    match statement:
        case ast.If(body=body, orelse=orelse):
            return [body, orelse]
        case ast.For(body=body) | ast.While(body=body):
            return [body, []]
        case ast.With(body=body):
            return [body]
        case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=finalbody):
            failed = [handler.body + finalbody for handler in handlers]
            return [body + orelse + finalbody, *failed]
        case ast.Match(cases=cases):
            return [case.body for case in cases]
    return []


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement without those of its blocks."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                waiting.append(child)


def _after(statement: ast.stmt, texts: Texts) -> Texts:
    """Return the texts after a statement, which may assign to variables."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=variables)], value=ast.Tuple(elts=values)):
            pairs = [*zip(variables, values, strict=True)]
        case ast.Assign(targets=[variable], value=value):
            pairs = [(variable, value)]
        case ast.AugAssign(target=ast.Name(id=name) as variable, op=ast.Add(), value=value) if name in texts:
            pairs = [(variable, ast.BinOp(variable, ast.Add(), value))]
    names = [node for node in _own_nodes(statement) if isinstance(node, ast.Name)]
    assigned = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    after = {name: text for name, text in texts.items() if name not in assigned}
    for variable, value in pairs:
        text = _text(value, texts)
        is_empty_text = isinstance(value, ast.Constant) and value.value == ""
        if text or is_empty_text:
            after[ast.unparse(variable)] = text
    return after


class _Filled(ast.NodeTransformer):
    """Replaces variables by their texts."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self._texts:
            return ast.Constant(self._texts[node.id])
        return node

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        if isinstance(node.value, ast.Name):
            filled = self.visit_Name(node.value)
            if filled is not node.value:
                return filled
        return node


def _text(node: ast.expr, texts: Texts) -> str:
    """Return the text of an argument, with those of the variables in it."""
    return template(_Filled(texts).visit(copy.deepcopy(node)))
