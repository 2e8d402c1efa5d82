"""The tree that holds the code of a run: git commands, the place of the trainer, and what Python imports from it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import hpcdist
from hpcdist.config.schema import Config
from hpcdist.files.bounded_json import parse_json

#: Options of `git ls-files` for files that git neither tracks nor ignores.
UNTRACKED = ("--others", "--exclude-standard")


@dataclass(frozen=True, kw_only=True)
class CodeTree:
    """The tree that holds the trainer of a run."""

    top: Path  #: top of the code; the ranks' working directory if the code is not copied
    root: Path | None  #: top of the git work tree, whose commit is that of the code; None outside of git
    copied: bool  #: whether the run folder gets a copy


def git_output(folder: Path, *arguments: str) -> str:
    """Return the output of a git command; empty if git is missing or fails (no commit yet, another owner)."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.decode(errors="surrogateescape") if done.returncode == 0 else ""


def git_root(cwd: Path) -> Path | None:
    """Return the top of the git work tree around a folder, or None."""
    top = git_output(cwd, "rev-parse", "--show-toplevel").strip()
    return Path(top) if top else None


def git_paths(top: Path, *options: str, place: Sequence[str] = ()) -> list[Path]:
    """Return the paths that `git ls-files` lists. `place` are options that name the repository."""
    listing = git_output(top, *place, "ls-files", "-z", *options)
    return [top / name for name in listing.split("\0") if name]


def find_module(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Return the spec of a top-level module: from `path`, else from this Python, with finders of editable installs."""
    try:
        return PathFinder.find_spec(name, path) or find_spec(name)
    except ValueError:  # `__main__` and other modules without a spec
        return None


def trainer_place(config: Config, path: Sequence[str]) -> Path | None:
    """Return the script of a user, or the file or folder of the trainer's top-level module.

    None if it is not found, or if it is installed in a folder of packages.

    Args:
        path: where Python looks for the module first.
    """
    script = config.trainer.script
    if script and script[0] != "-m":
        return Path(script[0]).parent.resolve() / Path(script[0]).name
    module = script[1] if script else config.trainer.target
    spec = find_module(module.partition(":")[0].partition(".")[0], path)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    place = Path(folders[0] if folders else spec.origin or "").resolve()
    return None if {"site-packages", "dist-packages"} & {*place.parts} or not place.exists() else place


def is_own(config: Config) -> bool:
    """Return whether the trainer is the user's: a script, or a function of a module."""
    return bool(config.trainer.script) or ":" in config.trainer.target


def find_tree(config: Config, cwd: Path) -> CodeTree:
    """Return the git work tree that holds the trainer, else `cwd`; for a shipped trainer the tree of hpcdist."""
    if is_own(config):
        place = trainer_place(config, [str(cwd)])
        root = (git_root(place.parent) if place is not None else None) or git_root(cwd)
        return CodeTree(top=root or cwd, root=root, copied=True)
    package = Path(hpcdist.__file__).resolve()
    root = git_root(package.parent) if git_paths(package.parent, "--cached", *UNTRACKED, package.name) else None
    copied = root is not None and cwd.is_relative_to(root)
    return CodeTree(top=root if copied and root else cwd, root=root, copied=copied)


def import_roots(top: Path, files: Collection[Path]) -> list[str]:
    """Return the folders below `top` in which this Python finds modules: `src` of an editable install, for example.

    Args:
        files: the files of the tree.
    """
    folders = {folder for file in files for folder in file.parents if top in folder.parents}
    found = [Path(entry).resolve() for entry in sys.path if entry]
    packages = {file.parent for file in files if file.name == "__init__.py"}
    for package in sorted(packages):
        if package.parent not in packages and (spec := find_module(package.name, [])) is not None and spec.origin:
            found += [package.parent] * (Path(spec.origin).resolve() == package / "__init__.py")
    return [folder.relative_to(top).as_posix() for folder in dict.fromkeys(found) if folder in folders]


def editable_projects() -> Iterator[Path]:
    """Yield the folders of editable installs in this Python, without hpcdist."""
    from importlib import metadata  # slow to import

    for distribution in metadata.distributions():
        if text := distribution.read_text("direct_url.json"):
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                origin = parse_json(text.encode())
                if origin["dir_info"]["editable"] and distribution.name != "hpcdist":
                    yield Path(unquote(urlsplit(origin["url"]).path))
