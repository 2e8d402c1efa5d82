"""MkDocs hooks: fill the generated parts of the reference pages from the code at build time.

A line `<!-- generated: NAME -->` in a page is replaced by the output of the generator of that name. An unknown name
fails the build.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hpcdist"
MARKER = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
VARIABLE = re.compile(r"(?<![A-Z0-9_])HPCDIST_[A-Z][A-Z0-9_]*[A-Z0-9]\b")
#: Files outside the package that read or set environment variables for users.
OTHER_SOURCES = ("docker/Dockerfile", "docker/compose-init.sh", "slurm/run.sbatch")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace every marker of a page."""
    return MARKER.sub(lambda match: GENERATORS[match[1]](), markdown)


def on_post_build(config: Any) -> None:
    """Publish the JSON schema of the config beside the pages."""
    if schema := json_schema():
        (Path(config["site_dir"]) / "config.schema.json").write_text(schema)


def json_schema() -> str:
    """Return what `hpcdist config --json-schema` prints; empty where the command has no such option."""
    from typer.testing import CliRunner

    from hpcdist.cli.app import app

    result = CliRunner().invoke(app, ["config", "--json-schema"])
    if result.exit_code == 2:
        return ""
    if result.exit_code:
        raise RuntimeError(f"hpcdist config --json-schema failed: {result.output} {result.exception}")
    return result.stdout


def _cell(text: object) -> str:
    """Escape a text for a cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;").replace("{{", "{ {")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _code(text: object) -> str:
    """Return a text as inline code that is safe inside a table."""
    plain = " ".join(str(text).split()).replace("|", "\\|")
    return f"`` {plain} ``" if "`" in plain else f"`{plain}`"


# --- config -----------------------------------------------------------------------------------------------------


def config_keys() -> list[tuple[str, str, Any, str]]:
    """Return every config key as (path, type, default, documentation)."""
    from hpcdist.config.schema.describe import describe

    return describe()


def _default(value: object) -> str:
    if dataclasses.is_dataclass(value):
        return ""
    if value == () or value == {} or value == []:
        return "empty"
    if isinstance(value, bool):
        return _code(str(value).lower())
    return _code('""' if value == "" else "null" if value is None else value)


def generate_config() -> str:
    """Return one table of keys per section."""
    sections: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for path, kind, default, text in config_keys():
        section = path.rpartition(".")[0].partition(".")[0] if "." in path else ""
        sections[section].append((_code(path), _code(kind), _default(default), _cell(text)))
    parts = []
    for section, rows in sections.items():
        parts += [f"## {'Top level' if not section else f'`{section}`'}", "", _table(HEAD, rows), ""]
    return "\n".join(parts)


HEAD = ("key", "type", "default", "meaning")

# --- command line -----------------------------------------------------------------------------------------------


def generate_cli() -> str:
    """Return a section per command with its usage, help text, arguments and options."""
    import typer.main

    from hpcdist.cli.app import app

    return "\n".join(_command(typer.main.get_command(app), "hpcdist", 2))


def _command(command: Any, path: str, level: int) -> Iterator[str]:
    import click

    if command.hidden:
        return
    if level > 2:
        yield f"{'#' * min(level - 1, 4)} `{path}`\n"
        # The help texts use the form feed and backspace conventions of click.
        paragraphs = (command.help or "").replace("\f", "").split("\n\n")
        examples = [text.strip() for text in paragraphs if text.strip().startswith(("hpcdist ", "sudo "))]
        for paragraph in paragraphs:
            preformatted = paragraph.startswith("\b")
            text = paragraph.removeprefix("\b").strip()
            if text not in examples:
                yield f"```text\n{text}\n```\n" if preformatted else f"{' '.join(text.split())}\n"
            elif text == examples[-1]:  # all examples in one block
                yield "```text\n" + "\n".join(" ".join(example.split()) for example in examples) + "\n```\n"
    subcommands = getattr(command, "commands", {})
    if not subcommands:
        context = click.Context(command, info_name=path)
        yield f"```text\n{' '.join([path, *command.collect_usage_pieces(context)])}\n```\n"
    rows = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name in ("help", "install_completion", "show_completion"):
            continue
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
        if parameter.param_type_name == "argument":
            names = parameter.make_metavar(click.Context(command)) if parameter.metavar is None else parameter.metavar
        default = parameter.default
        is_empty = default in (None, (), False) or callable(default) or "Sentinel" in repr(default)
        shown = "" if is_empty else default
        rows.append((_code(names), _cell(getattr(parameter, "help", "") or ""), _code(shown) if shown != "" else ""))
    if rows:
        yield _table(("option or argument", "meaning", "default"), rows) + "\n"
    for name, subcommand in subcommands.items():
        yield from _command(subcommand, f"{path} {name}", level + 1)


# --- environment variables --------------------------------------------------------------------------------------


def used_variables() -> dict[str, set[str]]:
    """Return the files that use each `HPCDIST_*` variable, by its name."""
    found: dict[str, set[str]] = defaultdict(set)
    sources = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".sh") and "__pycache__" not in path.parts]
    for path in [*sources, *(ROOT / name for name in OTHER_SOURCES)]:
        for match in VARIABLE.findall(path.read_text()):
            found[match].add(str(path.relative_to(ROOT)))
    return found


def generate_environment() -> str:
    """Return one table of variables per audience. A variable of the code without a description fails the build."""
    described: dict[str, dict[str, str]] = yaml.safe_load((ROOT / "docs/reference/environment.yml").read_text())
    used = used_variables()
    names = {name for group in described.values() for name in group}
    own = {name for name in names if name.startswith("HPCDIST_")}
    if missing := set(used) - own:
        raise RuntimeError(f"docs/reference/environment.yml has no description of {sorted(missing)}")
    if stale := own - set(used):
        raise RuntimeError(f"docs/reference/environment.yml describes unused variables {sorted(stale)}")
    parts = []
    for title, group in described.items():
        rows = [
            (_code(name), _cell(text), ", ".join(_code(path) for path in sorted(used.get(name, ()))))
            for name, text in group.items()
        ]
        parts += [f"## {title}", "", _table(("variable", "meaning", "used in"), rows), ""]
    return "\n".join(parts)


# --- messages ---------------------------------------------------------------------------------------------------


def _template(node: ast.AST) -> str:
    """Return the text of a string expression, with `{name}` for each value; empty where it is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + _name(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = (_template(side) or "{" + _name(side) + "}" for side in (node.left, node.right))
        return left + right if left.strip("{}").isidentifier() is False or " " in right else ""
    if isinstance(node, ast.IfExp):
        return _template(node.body) or _template(node.orelse)
    return ""


def _name(node: ast.AST) -> str:
    """Return a short name for a value in a message."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Subscript):
        return node.slice.value if isinstance(getattr(node.slice, "value", None), str) else _name(node.value)
    if isinstance(node, ast.Call):
        return _name(node.args[0]) if node.args else _name(node.func)
    if isinstance(node, ast.BinOp):
        return _name(node.left)
    return "…"


@dataclasses.dataclass(frozen=True)
class Message:
    """An error message of the code."""

    error: str
    text: str
    source: str


def messages() -> list[Message]:
    """Return every message that the package raises as one of its own errors, in the order of the source."""
    errors = importlib.import_module("hpcdist.errors")
    own = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        source = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                kind = ast.unparse(node.exc.func).rpartition(".")[2]
                if kind in own:
                    found += [Message(kind, text, source) for text in _texts(node.exc.args[0])]
            elif isinstance(node, ast.FunctionDef) and (
                "problem" in ast.unparse(node) or "ConfigError" in ast.unparse(node)
            ):
                found += [Message("ConfigError", text, source) for text in _problem_texts(node)]
    seen: set[tuple[str, str]] = set()
    return [m for m in found if (m.text, m.source) not in seen and not seen.add((m.text, m.source))]  # type: ignore[func-returns-value]


def _texts(node: ast.AST) -> Iterator[str]:
    elements = node.elts if isinstance(node, ast.List) else [node]
    for element in elements:
        text = _template(element)
        if len(re.sub(r"\{[^}]*\}", "", text).strip(" :.;,'")) >= 12:
            yield " ".join(text.split())


def _problem_texts(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the problems that a validation function collects: appended, yielded, or in a list."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            candidates: list[ast.AST] = list(node.args)
        elif isinstance(node, ast.List | ast.Yield):
            candidates = list(node.elts) if isinstance(node, ast.List) else [node.value] if node.value else []
        elif isinstance(node, ast.ListComp):
            candidates = [node.elt]
        else:
            continue
        for candidate in candidates:
            # A problem is a sentence: it names a key or a value and has several words.
            yield from (text for text in _texts(candidate) if text.count(" ") >= 4)


def generate_messages() -> str:
    """Return the error messages by part of the package."""
    errors = importlib.import_module("hpcdist.errors")
    parts: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for message in messages():
        part = message.source.split("/")[1].removesuffix(".py")
        code = str(getattr(errors, message.error).exit_code)
        parts[part].append((_code(message.text), f"{message.error} ({code})", _code(message.source)))
    return "\n\n".join(
        f"## `{part}`\n\n{_table(('message', 'error (exit code)', 'raised in'), rows)}" for part, rows in parts.items()
    )


def generate_errors() -> str:
    """Return the tree of errors with their exit codes."""
    errors = importlib.import_module("hpcdist.errors")
    rows = [
        (_code(name), str(value.exit_code), _cell((value.__doc__ or "").split("\n\n")[0]))
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.HpcdistError)
    ]
    return _table(("error", "exit code", "meaning"), rows)


def generate_failures() -> str:
    """Return the failures that `hpcdist explain` recognises, from its own table."""
    patterns = importlib.import_module("hpcdist.diagnostics.failure_patterns").PATTERNS
    parts = []
    for pattern in patterns:
        # Alternatives are separated by `|` outside parentheses.
        texts = "\n".join(re.split(r"\|(?![^()]*\))", pattern.texts.pattern))
        cause = pattern.cause.replace("{0}", "…")
        parts.append(f"### {pattern.name}\n\n```text\n{texts}\n```\n\n**Cause:** {cause}.\n\n**Fix:** {pattern.fix}.\n")
    return "\n".join(parts)


def generate_waiting() -> str:
    """Return Slurm's reasons for a waiting job, from the table of `hpcdist explain`."""
    waiting = importlib.import_module("hpcdist.diagnostics.failure_patterns").WAITING
    rows = [(_code(reason), _cell(cause), _cell(fix)) for reason, (cause, fix) in waiting.items()]
    return _table(("Slurm's reason", "cause", "fix"), rows)


def findings(folder: Path) -> list[tuple[str, ...]]:
    """Return the findings (`Check(...)` calls) of the modules in a folder as (name, level, text, fix)."""
    rows = []
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in ("Check", "Finding"):
                continue
            given = {keyword.arg: _resolved(keyword.value, tree) for keyword in node.keywords if keyword.arg}
            if not given.get("text") or given.get("level") in ("ok",):
                continue
            rows.append(tuple(given.get(key, "") for key in ("name", "level", "text", "fix")))
    return rows


def _resolved(node: ast.AST, tree: ast.Module) -> str:
    """Return the text of an argument; of a variable, that of the last assignment before."""
    if not isinstance(node, ast.Name):
        return _template(node)
    found: dict[int, str] = {}
    for other in ast.walk(tree):
        if not isinstance(other, ast.Assign) or not 0 <= node.lineno - other.lineno <= 12:
            continue
        for target in other.targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = other.value.elts if isinstance(other.value, ast.Tuple) else [other.value]
            for name, value in zip(names, values, strict=False):
                if isinstance(name, ast.Name) and name.id == node.id and _template(value):
                    found[other.lineno] = _template(value)
    return found[max(found)] if found else ""


def _findings_table(folder: Path) -> str:
    rows = [(_cell(name), _code(text), _cell(fix)) for name, _, text, fix in findings(folder)]
    return _table(("check", "finding", "fix"), rows)


def generate_preflight() -> str:
    """Return the findings of the preflight."""
    return _findings_table(PACKAGE / "preflight")


def generate_doctor() -> str:
    """Return the findings of `hpcdist doctor`."""
    return _findings_table(PACKAGE / "diagnostics" / "doctor")


# --- run folder and trainers ------------------------------------------------------------------------------------


def generate_run_folder() -> str:
    """Return the layout of a run folder, from the module that defines it."""
    text = importlib.import_module("hpcdist.run.folder").__doc__ or ""
    lines = [line for line in text.splitlines()[1:] if line.startswith("    ") or not line]
    return "```text\n" + "\n".join(line.removeprefix("    ") for line in lines).strip("\n") + "\n```"


def generate_configs() -> str:
    """Return the shipped configs with their first comment."""
    rows = []
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        comments = [line for line in path.read_text().splitlines() if line.startswith("# ") and "$schema" not in line]
        rows.append((_code(path.stem), _cell(comments[0].removeprefix("# ")) if comments else ""))
    return _table(("config", "content"), rows)


def generate_modules() -> str:
    """Return every package of hpcdist with the first line of its documentation."""
    rows = []
    for path in sorted(PACKAGE.iterdir()):
        source = path / "__init__.py" if path.is_dir() else path
        if not source.exists() or source.suffix != ".py" or path.name.startswith("__"):
            continue
        text = ast.get_docstring(ast.parse(source.read_text())) or ""
        rows.append((_code(str(path.relative_to(ROOT)) + ("/" if path.is_dir() else "")), _cell(text.split("\n\n")[0])))
    return _table(("package", "content"), rows)


GENERATORS: dict[str, Callable[[], str]] = {
    name.removeprefix("generate_").replace("_", "-"): value
    for name, value in dict(globals()).items()
    if name.startswith("generate_")
}
