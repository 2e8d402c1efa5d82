"""The code that a run was started with, kept in its folder, and the facts about where it came from."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hpcdist
from hpcdist.config import redacted_argument
from hpcdist.errors import RunFolderError, UserMistake
from hpcdist.formats import fill
from hpcdist.lease import user_name
from hpcdist.rundir import RunDir, read_record, write_atomic, write_json
from hpcdist.schema import Config

_PACKAGES = ("torch", "torchvision", "numpy", "mlflow", "omegaconf", "submitit")
MB = 2**20


@dataclass(frozen=True, kw_only=True)
class CodeState:
    """Where the code of a run comes from."""

    cwd: str  #: folder that the run was started in
    root: str  #: top of the git work tree around it, or `cwd`
    git_commit: str | None
    git_dirty: bool
    copied: bool  #: whether the run folder holds the code, and ranks import from there


def take(config: Config, run: RunDir, cwd: Path) -> CodeState:
    """Copy the user's code into the run folder, with the commit and the uncommitted changes.

    In a git work tree these are the tracked and the uncommitted files, ignored ones left out; elsewhere all files
    below `cwd` but hidden ones and virtual environments. A shipped trainer needs no copy, unless hpcdist itself is
    being worked on in this tree.

    Raises UserMistake when the code is larger than `launch.code_max_mb`.
    """
    root = git_root(cwd)
    commit = _git(root, "rev-parse", "HEAD").strip() or None if root else None
    dirty = bool(root and _git(root, "status", "--porcelain"))
    if root and commit:
        patch = _git(root, "diff", "--binary", "--no-color", "--no-ext-diff", "HEAD")
        write_atomic(run.path / "code.patch", patch.encode(errors="surrogateescape"))
    top = root or cwd
    is_users = bool(config.trainer.script) or ":" in config.trainer.target
    files = _git_files(root) if root else _plain_files(cwd) if is_users else []
    copied = is_users or Path(hpcdist.__file__).resolve() in files
    if copied:
        runs_dir = Path(config.runs_dir).resolve()  # git, too, names its work tree without links
        _copy(top, [path for path in files if not path.is_relative_to(runs_dir)], run.code, config)
    return CodeState(cwd=str(cwd), root=str(top), git_commit=commit, git_dirty=dirty, copied=copied)


def code_state(run: RunDir) -> CodeState:
    """Read from `environment.json` where the code of a run comes from. Raises RunFolderError when it is not there."""
    facts = read_record(run.environment)
    if facts is None:
        raise RunFolderError(f"run {run.name} was never made to the end (no environment.json): remove {run.path}")
    code = facts.get("code")
    found = fill(CodeState, code if isinstance(code, dict) else {}, run.environment)
    if found.copied and not Path(found.cwd).is_relative_to(found.root):
        raise RunFolderError(f"{run.environment} is damaged: the folder {found.cwd} is not below {found.root}")
    return found


def import_path(code: CodeState, run: RunDir) -> list[str]:
    """What goes in front of PYTHONPATH: the snapshot's twin of the starting folder, then its root."""
    if not code.copied:
        return []
    twin = run.code / Path(code.cwd).relative_to(code.root)
    return list(dict.fromkeys([str(twin), str(run.code)]))


def write_environment(run: RunDir, code: CodeState, **facts: Any) -> None:
    """Record machine, versions and code state in `environment.json`; never the environment's variables."""
    write_json(
        run.environment,
        {
            "host": socket.gethostname(),
            "user": user_name(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "command": " ".join(["hpcdist", *map(redacted_argument, sys.argv[1:])]),
            "versions": {"hpcdist": hpcdist.__version__, **dict(_versions())},
            "git_commit": code.git_commit,
            "git_dirty": code.git_dirty,
            "code": asdict(code),
            **facts,
        },
    )


def _versions() -> Iterator[tuple[str, str]]:
    from importlib import metadata  # a supervisor in a job has no use for it

    for package in _PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue


def _git(folder: Path, *arguments: str) -> str:
    """Output of a git command; empty where git is missing or refuses (no commit yet, foreign owner)."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.decode(errors="surrogateescape") if done.returncode == 0 else ""


def git_root(cwd: Path) -> Path | None:
    """The top of the git work tree around a folder, if it is in one."""
    top = _git(cwd, "rev-parse", "--show-toplevel").strip()
    return Path(top) if top else None


def _git_files(root: Path) -> list[Path]:
    listing = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    # A deleted file is still listed, and a submodule is listed as a folder.
    return [path for name in listing.split("\0") if name and _can_be_copied(path := root / name)]


def _plain_files(cwd: Path) -> list[Path]:
    files = []
    for folder, subfolders, names in os.walk(cwd):
        here = Path(folder)
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".") and name != "__pycache__" and not (here / name / "pyvenv.cfg").exists()
        ]
        # A link to a folder is among the subfolders, and is not walked into.
        links = [name for name in subfolders if (here / name).is_symlink()]
        files += [path for name in names + links if not name.startswith(".") and _can_be_copied(path := here / name)]
    return files


def _can_be_copied(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


def _copy(top: Path, files: list[Path], target: Path, config: Config) -> None:
    sizes = {path: path.lstat().st_size for path in files}
    total = sum(sizes.values())
    if total > config.launch.code_max_mb * MB:
        largest = ", ".join(
            f"{path.relative_to(top)} ({size / MB:.1f} MB)"
            for path, size in sorted(sizes.items(), key=lambda item: -item[1])[:3]
        )
        raise UserMistake(
            f"the code under {top} has {total / MB:.1f} MB, more than launch.code_max_mb={config.launch.code_max_mb:g}"
            f" (largest: {largest}): ignore data in .gitignore, or raise the limit"
        )
    shutil.rmtree(target, ignore_errors=True)
    for path in files:
        copy = target / path.relative_to(top)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy, follow_symlinks=False)
