"""Values that the shell completes: runs, experiments, configs, site profiles, config keys.

A completion must neither print an error nor keep the shell waiting: each lookup has LIMIT_S, after which the values
found so far are used, and an exception means no values.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

#: Time limit of a lookup; the runs may be on a slow network file system.
LIMIT_S = 3.0
#: Values that one completion returns at most.
MAX_VALUES = 500

Completer = Callable[[typer.Context, str], list[str]]


def _bounded(find: Callable[[typer.Context, str], Iterator[str]]) -> Completer:
    """Make a completer of a generator of candidates: prefix filter, time limit, no exceptions."""

    @functools.wraps(find)
    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        found: dict[str, None] = {}

        def collect() -> None:
            try:
                for value in find(ctx, incomplete):
                    if value.startswith(incomplete) and value.isprintable() and len(found) < MAX_VALUES:
                        found[value] = None
            except Exception:
                return

        # A daemon thread, so that a lookup that hangs does not keep the process alive.
        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        thread.join(LIMIT_S)
        return list(found)

    complete.__annotations__ = {"ctx": typer.Context, "incomplete": str, "return": list[str]}
    return complete


def _runs_dir(ctx: typer.Context) -> Path:
    return Path(ctx.params.get("runs_dir") or os.environ.get("HPCDIST_RUNS_DIR") or "runs").expanduser()


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    """Return the visible folders in a folder, the newest first."""
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(found, key=lambda entry: entry.name, reverse=True)


@_bounded
def runs(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """Yield names of runs and sweeps; `experiment/name` where the word has a slash."""
    for experiment in _folders(_runs_dir(ctx)):
        for run in _folders(Path(experiment.path)):
            name = f"{experiment.name}/{run.name}" if "/" in incomplete else run.name
            if name.startswith(incomplete) and any(
                os.path.lexists(f"{run.path}/{file}") for file in ("state.json", "sweep.json")
            ):
                yield name


@_bounded
def runs_or_last(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """Yield `last` and names of runs."""
    yield "last"
    yield from runs(ctx, incomplete)


@_bounded
def experiments(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """Yield names of experiments that have runs."""
    for folder in _folders(_runs_dir(ctx)):
        if any(os.path.lexists(f"{run.path}/state.json") for run in _folders(Path(folder.path))):
            yield folder.name


def _shipped(kind: str, incomplete: str) -> Iterator[str]:
    from hpcdist.config.shipped import shipped_configs

    yield from shipped_configs(kind)
    folder = Path(incomplete if incomplete.endswith("/") else os.path.dirname(incomplete))
    with os.scandir(folder.expanduser() if str(folder) != "." else ".") as entries:
        for entry in entries:
            if entry.name.endswith((".yaml", ".yml")) or ("/" in incomplete and entry.is_dir()):
                path = entry.name if str(folder) == "." else f"{folder}/{entry.name}"
                yield path + "/" * (not entry.name.endswith((".yaml", ".yml")))


@_bounded
def configs(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """Yield shipped configs and YAML files."""
    yield from _shipped("", incomplete)


@_bounded
def profiles(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """Yield shipped site profiles and YAML files."""
    yield from _shipped("cluster", incomplete)


def _values(kind: str, default: object) -> list[str]:
    """Return the values of a key as far as its type lists them, else its default."""
    if kind.startswith("Literal["):
        return [value.strip("' ") for value in kind.partition("[")[2].rpartition("]")[0].split(",")]
    if kind == "bool":
        return ["true", "false"]
    text = str(default)
    return [text] if default is not None and text and not set(text) & set(" '\"${}[]()") else []


@_bounded
def keys(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """Yield config keys as `key=`, and with a value if only one key matches.

    The value keeps shells from putting a space behind `key=`: they append one to a sole candidate.
    """
    from hpcdist.config.schema import describe

    schema = {key: (kind, default) for key, kind, default, _ in describe()}
    key, equals, _ = incomplete.partition("=")
    # bash splits a word at `=`: `optim.lr=0` arrives as `optim.lr`, `=`, `0`, and Typer may drop the `=`.
    words = ["", "", *(ctx.params.get("overrides") or [])]
    split = words[-2] if words[-1] == "=" else words[-1] if "=" not in (words[-2], *words[-1]) else ""
    if split:
        yield from _values(*schema.get(split, ("", None)))
        return
    matching = [name for name in schema if name.startswith(key)] if not equals else [key]
    for name in matching:
        if not equals:
            yield f"{name}="
        if len(matching) == 1:
            yield from (f"{name}={value}" for value in _values(*schema[name]))


def one_of(*names: str) -> Completer:
    """Return a completer of a fixed list."""

    @_bounded
    def names_of(ctx: typer.Context, incomplete: str) -> Iterator[str]:
        yield from names

    return names_of
