"""Restore the code of a recorded run into the folder of a new one: from its copy, or from git and its patch."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcdist.config.schema import Config
from hpcdist.errors import UserMistake
from hpcdist.files.atomic import write_atomic
from hpcdist.run.folder import RunDir
from hpcdist.run.snapshot import CodeState, take
from hpcdist.run.work_tree import git_root

#: Characters of a commit in messages.
SHORT = 12
#: Untracked files that a message names.
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class CodeSource:
    """Where the code of a recorded run is taken from."""

    recorded: CodeState
    patch: bytes = b""  #: uncommitted changes of the recorded run
    copy: Path | None = None  #: the copy in its run folder
    repository: Path | None = None  #: a git work tree with its commit
    text: str  #: where the code comes from, for messages
    missing: tuple[str, ...] = ()  #: what cannot be restored, one sentence each

    def restore(self, run: RunDir, config: Config) -> CodeState:
        """Write code and patch into the folder of a new run. Returns the origin of the code, that of the recorded run.

        Raises:
            UserMistake: git cannot check out the commit, the patch does not fit it, or the code is too large.
        """
        if self.copy is not None:
            shutil.copytree(self.copy, run.code, symlinks=True)
        elif self.repository is not None:
            _check_out(self, self.repository, run, config)
        if self.patch:
            write_atomic(run.path / "code.patch", self.patch)
        return self.recorded


def find_code(recorded: CodeState, patch: bytes, folder: RunDir | None, places: Sequence[Path]) -> CodeSource:
    """Return the source of a recorded run's code: the copy in its folder, else the first place with its commit.

    Args:
        recorded: the origin of its code.
        folder: its run folder, if that can be read here.
        places: folders in git work trees.

    Raises UserMistake if the code is in none of them.
    """
    if not recorded.copied:
        return CodeSource(recorded=recorded, patch=patch, text="the installed hpcdist, which contains the trainer")
    if folder is not None and folder.code.is_dir():
        return CodeSource(
            recorded=recorded,
            patch=patch,
            copy=folder.code,
            text=f"copied from {folder.code}",
            missing=_left_out(recorded),
        )
    advice = "`--with-current-code` runs the code of the current folder instead"
    if recorded.git_commit is None:
        raise UserMistake(
            f"the code of the run cannot be restored: it was not in git, and its run folder is not here: {advice}"
        )
    for place in places:
        if (root := git_root(place)) is not None and _has_commit(root, recorded.git_commit):
            changes = " with code.patch" if patch else ""
            return CodeSource(
                recorded=recorded,
                patch=patch,
                repository=root,
                text=f"commit {recorded.git_commit[:SHORT]} of {root}{changes}",
                missing=(*_untracked(recorded), *_left_out(recorded)),
            )
    looked = ", ".join(dict.fromkeys(map(str, places)))
    raise UserMistake(
        f"commit {recorded.git_commit[:SHORT]} of the run is not in a git repository at {looked}:"
        f" name one with --repository, or `git fetch` it; {advice}"
    )


def _left_out(recorded: CodeState) -> tuple[str, ...]:
    if not recorded.left_out:
        return ()
    return (f"likely secrets, which the run's record left out: {_listed(recorded.left_out, len(recorded.left_out))}",)


def _untracked(recorded: CodeState) -> tuple[str, ...]:
    if not recorded.num_untracked:
        return ()
    return (f"files that were not in git: {_listed(recorded.untracked, recorded.num_untracked)}",)


def _listed(names: Sequence[str], number: int) -> str:
    more = number - min(number, _SHOWN)
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more else "")


def _check_out(source: CodeSource, repository: Path, run: RunDir, config: Config) -> None:
    """Check out the commit with the patch in a temporary clone, and take a snapshot of that."""
    recorded = source.recorded
    assert recorded.git_commit is not None
    with tempfile.TemporaryDirectory(prefix="hpcdist-rerun-") as folder:
        clone = Path(folder) / "code"
        _git(["clone", "--quiet", "--shared", "--no-checkout", str(repository), str(clone)])
        _git(["-C", str(clone), "checkout", "--quiet", "--detach", recorded.git_commit])
        if source.patch:
            # With the index, so that new files of the patch are not untracked ones.
            _git(["-C", str(clone), "apply", "--index", "--whitespace=nowarn", "-"], source.patch)
        # The clone is below no `runs_dir`: the files of a run are chosen by name alone.
        take(replace(config, runs_dir=str(run.path)), run, Path(recorded.cwd), clone)


def _has_commit(root: Path, commit: str) -> bool:
    try:
        _git(["-C", str(root), "cat-file", "-e", f"{commit}^{{commit}}"])
    except UserMistake:
        return False
    return True


def _git(arguments: Sequence[str], data: bytes = b"") -> None:
    """Run a git command. Raises UserMistake with the last line of its message if it fails."""
    # Variables such as GIT_DIR, which a hook of git sets, would name another repository.
    env = {
        name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    }
    try:
        done = subprocess.run(["git", *arguments], input=data, capture_output=True, check=False, env=env)
    except FileNotFoundError:
        raise UserMistake("the code of the run is in git, and git is not installed here: install it") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        command = next(word for word in arguments if word in ("clone", "checkout", "apply", "cat-file"))
        raise UserMistake(f"git {command} failed: {' '.join((lines or ['no message'])[-1].split())}")
