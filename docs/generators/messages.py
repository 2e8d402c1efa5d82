"""Generators of the reference of error messages, which they read from the source of the package."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from generators.tables import PACKAGE, cell, code, folded, table
from hpcdist import errors
from hpcdist.host.image_identity import install_command

ERRORS: dict[str, type[errors.HpcdistError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.HpcdistError)
}
#: Characters of a sentence besides its values; a shorter text is a name or a word between values.
_MIN_CHARACTERS = 12


def error_classes() -> str:
    """Return the error classes with their exit codes."""
    rows = [
        (code(name), str(error.exit_code), cell((error.__doc__ or "").split("\n\n")[0]))
        for name, error in ERRORS.items()
    ]
    return table(("error", "exit code", "meaning"), rows)


def error_messages() -> str:
    """Return a foldable table of error messages per part of the package, because all together fill many screens."""
    parts: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for text, error in dict(raised_messages(ast.parse(path.read_text()))).items():
            parts[part].append((code(text), f"{error} ({ERRORS[error].exit_code})"))
    head = ("message", "error (exit code)")
    return "\n\n".join(
        f"## {part}\n\n{folded(f'{len(rows)} messages', table(head, rows))}" for part, rows in parts.items()
    )


def raised_messages(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (message, error class) of the `raise` statements and validation functions of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            error = ast.unparse(node.exc.func).rpartition(".")[2]
            if error in ERRORS:
                yield from ((text, error) for text in _sentences(node.exc.args[0]))
        elif isinstance(node, ast.FunctionDef) and re.search("problem|ConfigError", ast.unparse(node)):
            yield from ((text, "ConfigError") for text in _problems(node))


def _problems(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the messages that a validation function appends, yields or returns in a list."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            found: list[ast.expr] = node.args
        elif isinstance(node, ast.ListComp):
            found = [node.elt]
        elif isinstance(node, ast.List):
            found = node.elts
        elif isinstance(node, ast.Yield) and node.value:
            found = [node.value]
        else:
            continue
        # Other strings of such functions are names of keys or a few words.
        yield from (text for part in found for text in _sentences(part) if text.count(" ") >= 4)


def _sentences(node: ast.expr) -> Iterator[str]:
    """Yield the texts of an expression or of a list, without those that consist of little but values."""
    for element in node.elts if isinstance(node, ast.List) else [node]:
        text = " ".join(template(element).split())
        if has_words(text):
            yield text


def has_words(text: str) -> bool:
    """Return whether a text consists of more than values and a word."""
    return len(re.sub(r"\{[^}]*\}", "", text).strip(" :.;,'")) >= _MIN_CHARACTERS


def template(node: ast.expr, texts: Mapping[str, str] | None = None) -> str:
    """Return the text of a string expression with `{name}` for each value; empty if it is no string.

    Args:
        texts: of variables, which stand for these texts.
    """
    texts = texts or {}
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return texts.get(name, "")
        case ast.FormattedValue(value=ast.Name(id=name)) if texts.get(name):
            return texts[name]
        case ast.JoinedStr(values=parts):
            return "".join(template(part, texts) for part in parts)
        case ast.FormattedValue(value=ast.Call(func=ast.Name(id="install_command")) as call):
            return template(call)
        case ast.FormattedValue(value=value):
            return placeholder(value)
        case ast.IfExp(body=body, orelse=orelse):
            return template(body, texts) or template(orelse, texts)
        case ast.Call(func=ast.Name(id="install_command"), args=extras):
            return install_command(*map(ast.literal_eval, extras))
        case ast.BinOp(left=left, op=ast.Add(), right=right) if template(left, texts) or template(right, texts):
            return "".join(template(side, texts) or placeholder(side) for side in (left, right))
    return ""


def placeholder(node: ast.expr) -> str:
    """Return the last variable or attribute of an expression, such as `{lr}` for `config.optim.lr`."""
    source = re.sub(r"\[\w+\]|\.join| (for|if|or) .*", "", ast.unparse(node))
    names: list[str] = re.findall(r"\b_*([A-Za-z]\w*)", source)
    variables = [name for name in names if not name.isupper() and not name.endswith("__") and name != "self"]
    return "{" + (variables or names or ["…"])[-1] + "}"
