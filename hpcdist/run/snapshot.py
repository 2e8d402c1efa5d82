"""Snapshot of a run's code in its folder, and the description of its origin in `environment.json`."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hpcdist
from hpcdist.config.redaction import redact_words
from hpcdist.config.schema import Config
from hpcdist.config.written import redacted_argument
from hpcdist.errors import RunFolderError, UserMistake
from hpcdist.files.atomic import write_atomic, write_json
from hpcdist.files.formats import fill
from hpcdist.machine.facts import num_cores, source_digest
from hpcdist.run.folder import RunDir, read_record
from hpcdist.run.lease import user_name
from hpcdist.run.snapshot_filter import IGNORE_FILE, clean_patch, is_secret_file, without_secrets

_PACKAGES = ("torch", "torchvision", "numpy", "mlflow", "omegaconf", "submitit")
MB = 2**20
#: Limit of the secrets in one log line.
SHOWN = 8
#: Limit of the untracked files that are recorded by name.
MAX_UNTRACKED = 50
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CodeState:
    """Origin of a run's code."""

    cwd: str  #: folder in which the run was started
    root: str  #: top of the git work tree around it, or `cwd`
    git_commit: str | None
    git_dirty: bool
    copied: bool  #: whether the run folder holds a copy, which ranks import
    #: Likely secrets that are neither in the copy nor in the patch: files, and lines such as `train.py:12`.
    left_out: list[str] = field(default_factory=list)
    #: The first MAX_UNTRACKED files of the copy that are not in git, by their path below `root`.
    untracked: list[str] = field(default_factory=list)
    num_untracked: int | None = None  #: None if an older hpcdist has recorded the run


def take(config: Config, run: RunDir, cwd: Path) -> CodeState:
    """Copy the user's code into the run folder, and write the uncommitted changes to `code.patch`.

    In a git work tree, tracked and untracked files are copied, except ignored ones. Elsewhere, all files below `cwd`
    are copied, except hidden ones, virtual environments, and files that `.gitignore` excludes. `.hpcdistignore` applies
    in both cases. Likely secrets are left out and logged. The code of a shipped trainer is copied only if hpcdist
    itself is in this tree.

    Raises:
        UserMistake: the code is larger than `launch.code_max_mb`.
    """
    root = git_root(cwd)
    commit = _git(root, "rev-parse", "HEAD").strip() or None if root else None
    dirty = bool(root and _git(root, "status", "--porcelain"))
    top = root or cwd
    is_users = bool(config.trainer.script) or ":" in config.trainer.target
    ignored = _ignored(top, in_git=root is not None)
    left_out: list[str] = []
    if root and commit:
        patch, left_out = _patch(root, ignored)
        write_atomic(run.path / "code.patch", patch.encode(errors="surrogateescape"))
    files: list[Path] = []
    untracked: list[str] = []
    if root:
        # git also lists deleted files, and submodules as folders.
        files = [path for path in _git_paths(root, "--cached", "--others", "--exclude-standard") if _is_file(path)]
    elif is_users:
        files = _plain_files(cwd)
    copied = is_users or Path(hpcdist.__file__).resolve() in files
    if copied:
        runs_dir = Path(config.runs_dir).resolve()  # paths from git contain no symbolic links
        wanted = [path for path in files if path not in ignored and not path.is_relative_to(runs_dir)]
        kept, secret = _without_secrets(top, wanted, in_git=root is not None)
        left_out = list(dict.fromkeys([*left_out, *secret]))
        _copy(top, kept, run.code, config)
        if root:
            new = set(_git_paths(top, "--others", "--exclude-standard"))
            untracked = [path.relative_to(top).as_posix() for path in kept if path in new]
    if left_out:
        log.warning(
            "likely secrets are left out of the run's patch and copy of the code: %s"
            " (a comment `pragma: allowlist secret` keeps a line)",
            ", ".join(left_out[:SHOWN]) + (f" and {len(left_out) - SHOWN} more" if len(left_out) > SHOWN else ""),
        )
    return CodeState(
        cwd=str(cwd),
        root=str(top),
        git_commit=commit,
        git_dirty=dirty,
        copied=copied,
        left_out=left_out,
        untracked=untracked[:MAX_UNTRACKED],
        num_untracked=len(untracked),
    )


def _patch(root: Path, ignored: Collection[Path]) -> tuple[str, list[str]]:
    """Return the uncommitted changes without likely secrets, and the locations of these."""
    options = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "HEAD")
    names = [name for name in _git(root, "diff", "--name-only", "-z", *options).split("\0") if name]
    patch = _git(root, "diff", "--binary", *options)
    return clean_patch(patch, names, lambda name: root / name in ignored)


def _without_secrets(top: Path, files: list[Path], *, in_git: bool) -> tuple[list[Path], list[str]]:
    """Return the files to copy, and the locations of likely secrets.

    The content of tracked files is in git's history anyway, so only their names are checked.
    """
    new = set(_git_paths(top, "--others", "--exclude-standard")) if in_git else set(files)
    kept, secret = without_secrets(top, [path for path in files if path in new])
    tracked = [path for path in files if path not in new]
    secret += [name for path in tracked if is_secret_file(name := path.relative_to(top).as_posix())]
    out = new - set(kept)
    return [path for path in files if path not in out and not is_secret_file(path.relative_to(top).as_posix())], secret


def _ignored(top: Path, *, in_git: bool) -> set[Path]:
    """Return the files that `.hpcdistignore` excludes and, outside of a git work tree, `.gitignore`.

    Raises:
        UserMistake: there is a `.hpcdistignore`, but no git to interpret it.
    """
    own = [f"--exclude-from={top / IGNORE_FILE}"] if (top / IGNORE_FILE).is_file() else []
    if in_git:
        if not own:
            return set()
        # Unlike `.gitignore`, `.hpcdistignore` also excludes tracked files, which git lists in a separate call.
        return {*_git_paths(top, "--cached", "--ignored", *own), *_git_paths(top, "--others", "--ignored", *own)}
    if not own and not (top / ".gitignore").is_file():
        return set()
    if shutil.which("git") is None:
        if own:
            raise UserMistake(f"{top / IGNORE_FILE} needs git to be read: install git, or remove the file")
        return set()
    with tempfile.TemporaryDirectory() as folder:
        _git(Path(folder), "init", "--quiet")
        place = ("--git-dir", f"{folder}/.git", "--work-tree", str(top))
        return set(_git_paths(top, "--others", "--ignored", "--exclude-standard", *own, place=place))


def _git_paths(top: Path, *options: str, place: Sequence[str] = ()) -> list[Path]:
    listing = _git(top, *place, "ls-files", "-z", *options)
    return [top / name for name in listing.split("\0") if name]


def code_state(run: RunDir) -> CodeState:
    """Return the origin of a run's code from `environment.json`. Raises RunFolderError if the file is missing."""
    facts = read_record(run.environment)
    if facts is None:
        raise RunFolderError(f"run {run.name} is incomplete (no environment.json): remove {run.path}")
    return code_of(facts, run.environment)


def code_of(facts: Mapping[str, Any], path: Path) -> CodeState:
    """Return the origin of a run's code from the content of its `environment.json`. Raises RunFolderError.

    Args:
        path: of the file, for messages.
    """
    code = facts.get("code")
    found = fill(CodeState, code if isinstance(code, dict) else {}, path)
    cwd = Path(found.cwd)
    if found.copied and (not cwd.is_relative_to(found.root) or ".." in cwd.parts):
        raise RunFolderError(f"{path} is damaged: the folder {found.cwd} is not below {found.root}")
    return found


def import_path(code: CodeState, run: RunDir) -> list[str]:
    """Return the first entries of PYTHONPATH: the snapshot's copy of the working directory, then its root."""
    if not code.copied:
        return []
    copied_cwd = run.code / Path(code.cwd).relative_to(code.root)
    return list(dict.fromkeys([str(copied_cwd), str(run.code)]))


def write_environment(run: RunDir, code: CodeState, **facts: Any) -> None:
    """Record machine, versions and origin of the code in `environment.json`, but no environment variables."""
    write_json(
        run.environment,
        {
            "host": socket.gethostname(),
            "user": user_name(),
            "command": " ".join(["hpcdist", *map(str, redact_words([*map(redacted_argument, sys.argv[1:])]))]),
            **machine_facts(),
            "git_commit": code.git_commit,
            "git_dirty": code.git_dirty,
            "code": asdict(code),
            **facts,
        },
    )


def machine_facts() -> dict[str, Any]:
    """Return platform, cores, versions, and a digest of hpcdist's source files, as `environment.json` holds them."""
    return {
        "platform": platform.platform(),
        "cores": num_cores(),
        "python": platform.python_version(),
        "versions": {"hpcdist": hpcdist.__version__, **dict(_versions())},
        "source_digest": source_digest(str(Path(hpcdist.__file__).parent)),
    }


def _versions() -> Iterator[tuple[str, str]]:
    from importlib import metadata  # slow to import, and not needed in jobs

    for package in _PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue


def _git(folder: Path, *arguments: str) -> str:
    """Return the output of a git command; empty if git is missing or fails (no commit yet, another owner)."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.decode(errors="surrogateescape") if done.returncode == 0 else ""


def git_root(cwd: Path) -> Path | None:
    """Return the top of the git work tree around a folder, or None."""
    top = _git(cwd, "rev-parse", "--show-toplevel").strip()
    return Path(top) if top else None


def _plain_files(cwd: Path) -> list[Path]:
    files = []
    for folder, subfolders, names in os.walk(cwd):
        here = Path(folder)
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".") and name != "__pycache__" and not (here / name / "pyvenv.cfg").exists()
        ]
        # os.walk lists links to folders among the subfolders, and does not follow them.
        links = [name for name in subfolders if (here / name).is_symlink()]
        files += [path for name in names + links if not name.startswith(".") and _is_file(path := here / name)]
    return files


def _is_file(path: Path) -> bool:
    """Return whether a path is a regular file or a symbolic link, which may be dangling."""
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
