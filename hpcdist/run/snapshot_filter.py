"""Filter for a run's code snapshot: leaves out likely secrets and ignored files.

The patch is sent to MLflow, where other users can read it, so hunks with likely secrets are left out. The copy of the
code stays in the run folder, and ranks execute it. Files with secrets are left out of the copy, except Python modules,
because the run would fail without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from hpcdist.config.redaction import holds_secret
from hpcdist.run.folder import DATABASE

#: Read at the top of the code, in the syntax of `.gitignore`.
IGNORE_FILE = ".hpcdistignore"
#: Names of files that usually hold secrets; compared in lower case.
_SECRET_FILES = (
    ".env", ".env.*", "*.env", "*.pem", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.key", "*.ppk",
    "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".pgpass", ".my.cnf", ".npmrc", ".pypirc",
    ".htpasswd", ".git-credentials", "credentials", "credentials.*", "secrets.*", ".secrets", "kubeconfig",
    "*.tfstate", "*.tfvars", "service-account*.json", "service_account*.json",
)  # fmt: skip
_HARMLESS_FILES = ("*.pub", "*.example", "*.sample", "*.template", "*.py", "*.pyi", "*.md", "*.rst")
#: Folders with secrets in files of any name.
_SECRET_FOLDERS = (".aws", ".kube", ".docker", ".ssh", ".gnupg", ".azure")
_CODE = (".py", ".pyi", ".ipynb", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".js", ".ts", ".java", ".go")
#: Suffixes of files that ranks import from the copy.
_MODULES = (".py", ".pyi", ".so")
#: Larger files are not scanned: settings and source files are smaller.
MAX_SCAN_BYTES = 2**20
_HUNK = re.compile(r"@@ -\d+(?:,\d+)? \+(\d+)")


def _is_no_code(path: Path) -> bool:
    """Return whether a path is a run, a sweep, a file or folder of hpcdist beside runs, or a virtual environment."""
    if not path.is_dir():
        return path.name.startswith(DATABASE) or path.name == ".sync.lock"
    return (
        (path / "pyvenv.cfg").exists()
        or ((path / "state.json").exists() and (path / "attempts").is_dir())
        or (path.name == ".environments" and (path / "lock").exists())
        or path.name.startswith(".hpcdist-")
        or ((path / "sweep.json").exists() and any(path.parent.glob(f"{path.name}-*/cell.json")))
    )


def foreign(runs_dir: Path, cwd: Path, top: Path) -> Callable[[Path], bool]:
    """Return a function that returns whether a path below `top` is no code: in a run, for example, or in `runs_dir`."""
    runs_dir = runs_dir.resolve()  # paths from git contain no symbolic links

    @cache
    def is_foreign(path: Path) -> bool:
        is_all_runs = path == runs_dir and not cwd.is_relative_to(path)
        return path != top and (is_foreign(path.parent) or is_all_runs or _is_no_code(path))

    return is_foreign


def is_secret_file(name: str) -> bool:
    """Return whether a file probably holds secrets, by its path in the tree."""
    *folders, leaf = name.lower().split("/")
    if any(fnmatchcase(leaf, pattern) for pattern in _HARMLESS_FILES):
        return False
    return any(fnmatchcase(leaf, pattern) for pattern in _SECRET_FILES) or not set(folders).isdisjoint(_SECRET_FOLDERS)


def without_secrets(top: Path, files: Iterable[Path], new: Collection[Path]) -> tuple[list[Path], list[str]]:
    """Return the files to copy, and the locations of likely secrets: `name` or `name:line`, never the value.

    Args:
        files: files below `top`.
        new: files that git does not track. The content of others is in git's history, so only their names are checked.
    """
    kept, left_out = [], []
    for path in files:
        name = path.relative_to(top).as_posix()
        if is_secret_file(name):
            left_out.append(name)
        elif path in new and (line := _first_secret(path)) is not None:
            left_out.append(f"{name}:{line}")
        else:
            kept.append(path)
    return kept, left_out


def _first_secret(path: Path) -> int | None:
    """Return the number of the first line with a likely secret; None if there is none or the file is not scanned."""
    if path.suffix in _MODULES or path.is_symlink():
        return None
    try:
        if path.stat().st_size > MAX_SCAN_BYTES:
            return None
        raw = path.read_bytes()
    except OSError:  # it has vanished, or the copy will report it
        return None
    if b"\0" in raw[:8192]:
        return None
    lines = raw.decode(errors="replace").splitlines()
    code = path.suffix in _CODE
    return next((number for number, line in enumerate(lines, 1) if holds_secret(line, code=code)), None)


def clean_patch(patch: str, names: Sequence[str], ignored: Callable[[str], bool]) -> tuple[str, list[str]]:
    """Return a patch without hunks that hold a likely secret, and the locations of these: `name` or `name:line`.

    Args:
        patch: output of `git diff --binary --no-renames`.
        names: output of `git diff --name-only` with the same arguments: the files of the patch, in its order.
        ignored: returns whether a file is left out without a message.
    """
    head, *parts = re.split(r"^(?=diff --git )", patch, flags=re.MULTILINE)
    if len(parts) != len(names):
        # For example during a merge: parts cannot be assigned to files.
        return "", ["code.patch (files that are not merged yet)"]
    kept, left_out = [head], []
    for name, part in zip(names, parts, strict=True):
        if ignored(name):
            continue
        if is_secret_file(name):
            left_out.append(name)
            continue
        text, found = _clean_file(part, code=Path(name).suffix in _CODE)
        kept.append(text)
        left_out += [f"{name}:{line}" for line in found]
    return "".join(kept), left_out


def _clean_file(part: str, *, code: bool) -> tuple[str, list[int]]:
    """Return a file's part of a patch without suspicious hunks (empty if none remains), and their line numbers."""
    if "\nGIT binary patch\n" in part:
        return part, []
    header, *hunks = re.split(r"^(?=@@ -)", part, flags=re.MULTILINE)
    kept, found = [], []
    for hunk in hunks:
        line = next(_secret_lines(hunk, code=code), None)
        if line is None:
            kept.append(hunk)
        else:
            found.append(line)
    # A file without hunks was only renamed or made executable.
    return (header + "".join(kept) if kept or not hunks else ""), found


def _secret_lines(hunk: str, *, code: bool) -> Iterator[int]:
    """Yield the numbers of suspicious lines in the new file; for a removed line, the number of the line after it."""
    first, *lines = hunk.split("\n")
    match = _HUNK.match(first)
    number = int(match[1]) if match else 0
    for line in lines:
        if holds_secret(line[1:].rstrip("\r"), code=code):
            yield number
        if line[:1] in ("+", " "):
            number += 1
