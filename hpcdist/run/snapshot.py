"""Snapshot of a run's code in its folder, and the description of its origin in `environment.json`."""

from __future__ import annotations

import filecmp
import logging
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
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
from hpcdist.run.snapshot_filter import IGNORE_FILE, clean_patch, foreign, without_secrets
from hpcdist.run.work_tree import (
    UNTRACKED,
    CodeTree,
    editable_projects,
    find_tree,
    git_output,
    git_paths,
    import_roots,
    is_own,
    trainer_place,
)

_PACKAGES = ("torch", "torchvision", "numpy", "mlflow", "omegaconf", "submitit")
MB = 2**20
#: Limit of the secrets in one log line.
SHOWN = 8
#: Limit of the untracked files that are recorded by name.
MAX_UNTRACKED = 50
#: Limit of the links from a copy to what it leaves out.
MAX_LINKS = 1000
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CodeState:
    """Origin of a run's code."""

    cwd: str  #: folder in which the run was started
    root: str  #: top of the git work tree around it, or `cwd`
    git_commit: str | None
    git_dirty: bool  #: whether tracked files had changes
    copied: bool  #: whether the run folder holds a copy, which ranks import
    #: Likely secrets that are neither in the copy nor in the patch: files, and lines such as `train.py:12`.
    left_out: list[str] = field(default_factory=list)
    #: The first MAX_UNTRACKED files of the copy that are not in git, by their path below `root`.
    untracked: list[str] = field(default_factory=list)
    num_untracked: int = 0
    sources: list[str] = field(default_factory=list)  #: folders of the copy, such as `src`, that ranks import from
    live: list[str] = field(default_factory=list)  #: folders of code that ranks import without a copy


def take(config: Config, run: RunDir, cwd: Path, folder: Path | None = None) -> CodeState:
    """Copy the user's code into the run folder, and write the uncommitted changes to `code.patch`.

    The code is the git work tree that holds the trainer, else all files below `cwd`. In a git work tree, tracked and
    untracked files are copied, except ignored ones. Elsewhere, hidden files and files that `.gitignore` excludes are
    left out. `.hpcdistignore` applies in both cases. Likely secrets are left out and logged. Runs and virtual
    environments are left out as well. Links in the copy lead to everything else.

    The code of a shipped trainer is copied only if hpcdist itself is in the tree of `cwd`.

    Args:
        folder: the top of a git work tree to copy, instead of the tree that holds the trainer.

    Raises:
        UserMistake: the code is larger than `launch.code_max_mb`.
    """
    tree = find_tree(config, cwd) if folder is None else CodeTree(top=folder, root=folder, copied=True)
    top, root = tree.top, tree.root
    commit = git_output(root, "rev-parse", "HEAD").strip() or None if root else None
    ignored = _ignored(top, in_git=root is not None) if tree.copied or root else set()
    patch, left_out = _patch(root, ignored) if root and commit else ("", [])
    if patch:
        write_atomic(run.path / "code.patch", patch.encode(errors="surrogateescape"))
    else:
        (run.path / "code.patch").unlink(missing_ok=True)
    new = set(git_paths(root, *UNTRACKED)) if root and tree.copied else set()
    kept: list[Path] = []
    if tree.copied:
        is_foreign = foreign(Path(config.runs_dir), cwd, top)
        # git also lists deleted files, and submodules as folders.
        listed = git_paths(root, "--cached", *UNTRACKED) if root else _plain_files(top, is_foreign)
        wanted = [path for path in listed if path not in ignored and _is_file(path) and not is_foreign(path)]
        kept, secret = without_secrets(top, wanted, new if root else set(wanted))
        left_out = list(dict.fromkeys([*left_out, *secret]))
        _copy(top, kept, run.code, config)
        if folder is None:
            _link_rest(top, kept, run.code, is_foreign)
    if left_out:
        log.warning(
            "likely secrets are left out of the run's patch and copy of the code: %s"
            " (a comment `pragma: allowlist secret` keeps a line)",
            ", ".join(left_out[:SHOWN]) + (f" and {len(left_out) - SHOWN} more" if len(left_out) > SHOWN else ""),
        )
    untracked = [path.relative_to(top).as_posix() for path in kept if path in new]
    code = CodeState(
        cwd=str(cwd),
        root=str(top),
        git_commit=commit,
        git_dirty=bool(root and git_output(root, "status", "--porcelain", "--untracked-files=no")),
        copied=tree.copied,
        left_out=left_out,
        untracked=untracked[:MAX_UNTRACKED],
        num_untracked=len(untracked),
        sources=import_roots(top, kept),
    )
    return replace(code, live=_live(config, run, code)) if is_own(config) and folder is None else code


def _link_rest(top: Path, files: Sequence[Path], target: Path, is_foreign: Callable[[Path], bool]) -> None:
    """Link what the copy leaves out, so that a path relative to `__file__` leads to the user's data.

    The links also lead to modules that a build generates, which git usually ignores.
    """
    links = 0
    for folder in sorted({top, *(folder for file in files for folder in file.parents if top in folder.parents)}):
        for entry in folder.glob("*"):
            link = target / entry.relative_to(top)
            if entry.name in (".git", "__pycache__") or os.path.lexists(link) or is_foreign(entry):
                continue
            if links == MAX_LINKS:
                log.warning(
                    "more than %d files beside the code in %s are neither copied nor linked: the script does not find"
                    " them by paths relative to its own; move them to a folder of their own",
                    MAX_LINKS,
                    top,
                )
                return
            link.symlink_to(entry)
            links += 1


def _live(config: Config, run: RunDir, code: CodeState) -> list[str]:
    """Return the folders of code that ranks do not import from the copy; logs that of the trainer."""
    place = trainer_place(config, import_path(code, run))
    live = []
    if place is not None and run.copy_in(code.root, place) is None and not place.is_relative_to(run.code.resolve()):
        live.append(str(place))
        name = place.name if config.trainer.script else config.trainer.target.partition(":")[0].partition(".")[0]
        log.warning("%s is imported from %s, not from a copy: later edits of it change the run", name, place)
    if config.container.runtime == "none" and config.cluster.environment.kind == "none":  # ranks have this Python
        live += [str(folder) for folder in editable_projects() if not folder.resolve().is_relative_to(code.root)]
    return list(dict.fromkeys(live))


def _patch(root: Path, ignored: Collection[Path]) -> tuple[str, list[str]]:
    """Return the uncommitted changes without likely secrets, and the locations of these."""
    options = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "HEAD")
    names = [name for name in git_output(root, "diff", "--name-only", "-z", *options).split("\0") if name]
    patch = git_output(root, "diff", "--binary", *options)
    return clean_patch(patch, names, lambda name: root / name in ignored)


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
        return {*git_paths(top, "--cached", "--ignored", *own), *git_paths(top, "--others", "--ignored", *own)}
    if not own and not (top / ".gitignore").is_file():
        return set()
    if shutil.which("git") is None:
        if own:
            raise UserMistake(f"{top / IGNORE_FILE} needs git to be read: install git, or remove the file")
        return set()
    with tempfile.TemporaryDirectory() as folder:
        git_output(Path(folder), "init", "--quiet")
        place = ("--git-dir", f"{folder}/.git", "--work-tree", str(top))
        return set(git_paths(top, "--others", "--ignored", "--exclude-standard", *own, place=place))


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
    for folder in [found.cwd, *found.sources] if found.copied else []:
        if ".." in Path(folder).parts or Path(folder).is_absolute() == (folder in found.sources):
            raise RunFolderError(f"{path} is damaged: {folder} is not a folder of code")
    return found


def import_path(code: CodeState, run: RunDir) -> list[str]:
    """Return the first entries of PYTHONPATH: the snapshot's copy of the working directory, its root, its sources."""
    if not code.copied:
        return []
    cwd = Path(code.cwd)
    is_inside = cwd.is_relative_to(code.root)
    first = [run.code / cwd.relative_to(code.root)] if is_inside else []
    last = [] if is_inside else [cwd]
    return list(dict.fromkeys(map(str, [*first, run.code, *(run.code / name for name in code.sources), *last])))


def changed_files(code: CodeState, run: RunDir) -> list[str]:
    """Return the files of the copy whose originals now have another content, by their path below `root`."""
    copies = [copy for copy in sorted(run.code.rglob("*")) if copy.is_file() and not copy.is_symlink()]
    pairs = [(copy, code.root / copy.relative_to(run.code)) for copy in copies if code.copied]
    changed = [copy for copy, origin in pairs if origin.is_file() and not filecmp.cmp(copy, origin)]
    return [copy.relative_to(run.code).as_posix() for copy in changed]


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


def _plain_files(top: Path, is_foreign: Callable[[Path], bool]) -> list[Path]:
    files = []
    for folder, subfolders, names in os.walk(top):
        here = Path(folder)
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".") and name != "__pycache__" and not is_foreign(here / name)
        ]
        # os.walk lists links to folders among the subfolders, and does not follow them.
        links = [name for name in subfolders if (here / name).is_symlink()]
        files += [here / name for name in names + links if not name.startswith(".")]
    return files


def _is_file(path: Path) -> bool:
    """Return whether a path is a regular file or a symbolic link, which may be dangling."""
    return path.is_symlink() or path.is_file()


def _copy(top: Path, files: list[Path], target: Path, config: Config) -> None:
    sizes: dict[Path, int] = {}
    for path in files:
        with suppress(FileNotFoundError, NotADirectoryError):  # it has vanished
            sizes[path] = path.lstat().st_size
    total = sum(sizes.values())
    if total > config.launch.code_max_mb * MB:
        largest = ", ".join(
            f"{path.relative_to(top)} ({size / MB:.1f} MB)"
            for path, size in sorted(sizes.items(), key=lambda item: -item[1])[:3]
        )
        raise UserMistake(
            f"the code under {top} has {total / MB:.1f} MB, more than launch.code_max_mb={config.launch.code_max_mb:g}"
            f" (largest: {largest}): name data and outputs in .gitignore or {IGNORE_FILE} (the copy then has links to"
            " them), or raise the limit"
        )
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in sizes:
        copy = target / path.relative_to(top)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError, NotADirectoryError):
            shutil.copy2(path, copy, follow_symlinks=False)
