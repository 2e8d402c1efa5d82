"""The snapshot of a run's code.

The module finds the tree that contains the code, copies it into the run folder, and records its origin in
`environment.json`. A run that is like another one gets a copy of the other's snapshot.
"""

import filecmp
import hashlib
import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import hpcdist
from hpcdist.config.redaction import redact_words
from hpcdist.config.schema import Config
from hpcdist.config.trainer_declaration import find_trainer
from hpcdist.config.written import redacted_argument
from hpcdist.errors import RunFolderError, UserMistake, few
from hpcdist.host import machine
from hpcdist.host.files import write_atomic
from hpcdist.host.json_files import fill, parse_json, write_json
from hpcdist.host.versions import versions as installed_versions
from hpcdist.run.code_files import code_files
from hpcdist.run.folder import DATABASE, RunDir, read_record
from hpcdist.run.lease import user_name

log = logging.getLogger(__name__)
#: Letters and a blank before each path in the output of `git status --porcelain`.
_STATUS_WIDTH = 3

# The tree that holds the code of a run.

#: Options of `git ls-files` for files that git neither tracks nor ignores.
UNTRACKED = ("--others", "--exclude-standard")


def _git_env() -> dict[str, str]:
    """Return the environment without the variables of a hook of git, which would name another repository."""
    names = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    return {name: value for name, value in os.environ.items() if name not in names}


def git_output(folder: Path, *arguments: str) -> str:
    """Return the output of a git command; empty if git is missing or fails (no commit yet, another owner)."""
    return _git(folder, *arguments) or ""


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command; None if git is missing or fails."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=False, env=_git_env())
    except FileNotFoundError:
        return None
    if done.returncode != 0:
        return None
    return done.stdout.decode(errors="surrogateescape")


def git_root(cwd: Path) -> Path | None:
    """Return the top of the git work tree that contains a folder; None if there is none, or no git."""
    top = git_output(cwd, "rev-parse", "--show-toplevel").strip()
    if not top:
        return None
    return Path(top)


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


def own_module(config: Config) -> str:
    """Return the top-level name of the user's module: a trainer, or a module that a shipped trainer imports.

    It is empty if the run has no code of the user's.
    """
    if config.trainer.script:
        return config.trainer.script_name.partition(".")[0]
    target = config.trainer.target
    trainer = find_trainer(target)
    if trainer is not None:
        if not trainer.module_key:
            return ""
        target = str(getattr(config.sections[target], trainer.module_key))
    module, colon, _ = target.partition(":")
    if not colon:
        return ""
    return module.partition(".")[0]


def trainer_place(config: Config, path: Sequence[str]) -> Path | None:
    """Return the script, or the file or folder of the user's module, which is searched in `path` first.

    None if it is installed as a package, or missing.
    """
    file = config.trainer.script_file
    if file is not None:
        return file.parent.resolve() / file.name
    module = own_module(config)
    if not module:
        return None
    spec = find_module(module, path)
    if spec is None:
        return None
    folders = [*(spec.submodule_search_locations or ()), spec.origin or ""]
    place = Path(folders[0]).resolve()
    is_installed = "site-packages" in place.parts or "dist-packages" in place.parts
    if is_installed or not place.exists():
        return None
    return place


def is_own(config: Config) -> bool:
    """Return whether the ranks run code of the user's: a script, a function of a module, or a module that it names."""
    return bool(config.trainer.script or own_module(config))


def find_tree(config: Config, cwd: Path) -> tuple[Path, Path | None, bool]:
    """Return the top of the trainer's code, else `cwd`; the top of its git work tree; and whether it is copied."""
    root: Path | None = None
    if is_own(config):
        place = trainer_place(config, [str(cwd)])
        if place is not None:
            root = git_root(place.parent)
        root = root or git_root(cwd)
        return root or cwd, root, True
    package = Path(hpcdist.__file__).resolve()
    if git_paths(package.parent, "--cached", *UNTRACKED, package.name):
        root = git_root(package.parent)
    if root is not None and cwd.is_relative_to(root):
        return root, root, True
    return cwd, root, False


def import_roots(top: Path, files: Collection[Path]) -> list[str]:
    """Return the folders of a tree in which this Python finds modules: `src` of an editable install, for example."""
    roots = [Path(entry).resolve() for entry in sys.path if entry]
    packages = {file.parent for file in files if file.name == "__init__.py"}
    for package in sorted(packages):
        if package.parent in packages:
            continue
        spec = find_module(package.name, [])
        if spec is not None and spec.origin and Path(spec.origin).resolve() == package / "__init__.py":
            roots.append(package.parent)
    folders = _folders_of(top, files)
    return [root.relative_to(top).as_posix() for root in dict.fromkeys(roots) if root in folders]


def _folders_of(top: Path, files: Collection[Path]) -> set[Path]:
    """Return the folders below `top` that contain files."""
    folders: set[Path] = set()
    for file in files:
        folders.update(folder for folder in file.parents if top in folder.parents)
    return folders


# Runs and environments in a tree.

#: Folders in which MLflow keeps runs and their artifacts.
_MLFLOW_FOLDERS = ("mlartifacts", "mlruns")


def foreign(runs_dir: Path, cwd: Path, top: Path) -> Callable[[Path], bool]:
    """Return a function that returns whether a path below `top` belongs to runs, hpcdist or a virtual environment."""
    runs_dir = runs_dir.resolve()  # paths from git contain no symbolic links

    @cache
    def is_foreign(path: Path) -> bool:
        if path == top:
            return False
        if is_foreign(path.parent) or (path == runs_dir and not cwd.is_relative_to(path)):
            return True
        if not path.is_dir():
            return path.name.startswith(DATABASE)
        if path.name.startswith(".hpcdist-") or path.name in _MLFLOW_FOLDERS or (path / "pyvenv.cfg").exists():
            return True
        if (path / DATABASE).exists() and not cwd.is_relative_to(path) and not any(path.glob("*.py")):
            return True  # the folder of runs of another working folder
        is_run = (path / "state.json").exists() and (path / "attempts").is_dir()
        return is_run or ((path / "sweep.json").exists() and any(path.parent.glob(f"{path.name}-*/cell.json")))

    return is_foreign


# Snapshot of a run's code in its folder, and the description of its origin in `environment.json`.

_PACKAGES = ("torchvision", "numpy", "mlflow", "omegaconf", "submitit")
MB = 2**20
#: Limit of a code snapshot: a larger project folder contains data or outputs, which each run would copy.
MAX_CODE_MB = 200
#: Limit of the untracked files that are recorded by name.
MAX_UNTRACKED = 50
#: Limit of the links from a copy to files that it does not contain.
MAX_LINKS = 1000


@dataclass(frozen=True, kw_only=True)
class CodeState:
    """The origin of a run's code, as `environment.json` records it."""

    cwd: str  #: folder in which the run was started
    root: str  #: top of the git work tree around it, or `cwd`
    git_commit: str | None
    git_dirty: bool  #: whether tracked files had changes
    copied: bool  #: whether the run folder holds a copy, which ranks import
    #: Tracked files with uncommitted changes, by their path below the top of the git work tree.
    changed: list[str] = field(default_factory=list)
    #: The first MAX_UNTRACKED files of the copy that are not in git, by their path below `root`.
    untracked: list[str] = field(default_factory=list)
    num_untracked: int = 0
    sources: list[str] = field(default_factory=list)  #: folders of the copy, such as `src`, that ranks import from
    live: list[str] = field(default_factory=list)  #: folders of code that ranks import without a copy
    no_commit: str = ""  #: why `git_commit` is None, if it is known


def take(config: Config, run: RunDir, cwd: Path) -> CodeState:
    """Copy the user's code into the run folder, and write the uncommitted changes to `code.patch`.

    The code is in the git work tree that holds the trainer, else below `cwd`. `code_files` selects it from the files
    that are not ignored, in a plain folder not hidden either. Runs and virtual environments are left out. Links in the
    copy lead to everything else.

    The code of a shipped trainer is copied only if hpcdist itself is in the tree of `cwd`.
    """
    top, root, copied = find_tree(config, cwd)
    commit = ""
    if root is not None:
        commit = git_output(root, "rev-parse", "HEAD").strip()
    patch: str | None = ""
    changed: list[str] = []
    if root is not None and commit:
        options = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "HEAD")
        patch = _git(root, "diff", "--binary", *options)
        if patch is None:
            status = git_output(root, "status", "--porcelain", "--untracked-files=no", "--no-renames", "-z")
            changed = [entry[_STATUS_WIDTH:] for entry in status.split("\0") if entry]
            log.warning(
                "%s: `git diff HEAD` fails, so the run folder gets no code.patch with the uncommitted changes of %s",
                root,
                few(changed),
            )
        else:
            names = git_output(root, "diff", "--name-only", "-z", *options)
            changed = [name for name in names.split("\0") if name]
    if patch:
        write_atomic(run.patch, patch.encode(errors="surrogateescape"))
    else:
        run.patch.unlink(missing_ok=True)
    kept: list[Path] = []
    untracked: list[str] = []
    if copied:
        kept, untracked = _copy_code(config, run, cwd, top, root)
    no_commit = ""
    if not commit:
        no_commit = _why_no_commit(top, root)
    code = CodeState(
        cwd=str(cwd),
        root=str(top),
        git_commit=commit or None,
        git_dirty=bool(changed),
        copied=copied,
        changed=changed,
        untracked=untracked[:MAX_UNTRACKED],
        num_untracked=len(untracked),
        sources=import_roots(top, kept),
        no_commit=no_commit,
    )
    if not is_own(config):
        return code
    return replace(code, live=_live(config, run, code))


def _copy_code(config: Config, run: RunDir, cwd: Path, top: Path, root: Path | None) -> tuple[list[Path], list[str]]:
    """Copy the code below `top` into the run folder, and link the rest.

    Args:
        root: of the git work tree; None without one.

    Returns the copied files, and the names of those that git does not track.
    """
    is_foreign = foreign(Path(config.runs_dir), cwd, top)
    tracked: list[Path] = []
    if root is None:
        others = _plain_files(top, is_foreign)
    else:
        tracked = git_paths(root, "--cached")
        others = git_paths(root, *UNTRACKED)
    # git also lists deleted files, and submodules as folders. A link may be dangling.
    files = [path for path in tracked + others if path.is_symlink() or path.is_file()]
    must_have = set(tracked)
    place = trainer_place(config, [str(cwd)])
    if place is not None:
        must_have.add(place)  # a script, whatever its name
    kept = code_files(top, [path for path in files if not is_foreign(path)], must_have)
    _copy(top, kept, run.code, in_git=root is not None)
    _link_rest(top, kept, run.code, is_foreign)
    if root is None:
        return kept, []
    return kept, [path.relative_to(top).as_posix() for path in sorted({*kept} & {*others})]


def _why_no_commit(top: Path, root: Path | None) -> str:
    if root is not None:
        return "its git repository had no commit yet"
    if not any(os.path.lexists(folder / ".git") for folder in (top, *top.parents)):
        return "it was not in a git repository"
    if shutil.which("git") is None:
        return "git is not installed"
    return "git could not read its repository"  # it belongs to another user, for example


def take_from(original: RunDir, config: Config, run: RunDir, cwd: Path) -> CodeState:
    """Copy the code and the patch of the run `original` into the folder of a new run.

    If the original has no copy of its code, the new run gets its code by `take`. Raises UserMistake if the copy has
    been removed.
    """
    code = code_state(original)
    if not code.copied:
        return take(config, run, cwd)
    if not original.code.is_dir():
        fix = f"restore the code in {code.root}"
        if code.git_commit:
            fix = f"`git checkout {code.git_commit}` in {code.root}"
        raise UserMistake(
            f"the copy of the code of run {original.name} is gone: {original.code} does not exist; {fix}, then"
            f" `hpcdist run {original.config} name=NEW`"
        )
    _copy_snapshot(original, run)
    if original.patch.is_file():
        shutil.copyfile(original.patch, run.patch)
    return code


def _copy_snapshot(original: RunDir, run: RunDir) -> None:
    """Copy the code of another run, without files that its ranks have written beside it."""
    digests = read_code_files(original)

    def written(folder: str, names: list[str]) -> list[str]:
        paths = [Path(folder) / name for name in names]
        files = [path for path in paths if path.is_file() and not path.is_symlink()]
        return [path.name for path in files if path.relative_to(original.code).as_posix() not in digests]

    shutil.copytree(original.code, run.code, symlinks=True, ignore=written)


def _link_rest(top: Path, files: Sequence[Path], target: Path, is_foreign: Callable[[Path], bool]) -> None:
    """Make links to the files beside the code that are not copied.

    Code finds data by paths relative to `__file__`, and imports modules that a build has generated.
    """
    links = 0
    for folder in sorted({top, *_folders_of(top, files)}):
        for entry in folder.glob("*"):
            link = target / entry.relative_to(top)
            if entry.name in (".git", "__pycache__") or os.path.lexists(link) or is_foreign(entry):
                continue
            if links == MAX_LINKS:
                why = "the script does not find them by paths relative to its own; move them to a folder of their own"
                log.warning("over %d files beside the code in %s are neither copied nor linked: %s", links, top, why)
                return
            link.symlink_to(entry)
            links += 1


def _live(config: Config, run: RunDir, code: CodeState) -> list[str]:
    """Return the folders and files of code that ranks import from their original places, which may change later."""
    place = trainer_place(config, import_path(code, run))
    live = []
    if place is not None and run.copy_in(code.root, place) is None and not place.is_relative_to(run.code.resolve()):
        live.append(str(place))
        name = own_module(config)
        if config.trainer.script:
            name = place.name
        log.warning("%s is imported from %s, not from a copy: later edits of it change the run", name, place)
    if config.container.runtime == "none" and config.cluster.environment.kind == "none":  # ranks have this Python
        live += _editable_installs(code.root)
    return list(dict.fromkeys(live))


def _editable_installs(root: str) -> list[str]:
    """Return the folders outside `root` from which this Python imports editable installs, except hpcdist's."""
    from importlib import metadata  # slow to import

    folders = []
    for distribution in metadata.distributions():
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            origin = parse_json((distribution.read_text("direct_url.json") or "").encode())
            folder = Path(unquote(urlsplit(origin["url"]).path))
            is_editable = origin["dir_info"]["editable"]
            if is_editable and not folder.resolve().is_relative_to(root) and distribution.name != "hpcdist":
                folders.append(str(folder))
    return folders


def _ignored(top: Path) -> set[Path]:
    """Return the files that `.gitignore` excludes from a folder that is not in a git work tree."""
    if not (top / ".gitignore").is_file() or shutil.which("git") is None:
        return set()
    with tempfile.TemporaryDirectory() as folder:
        git_output(Path(folder), "init", "--quiet")
        place = ("--git-dir", f"{folder}/.git", "--work-tree", str(top))
        return set(git_paths(top, "--others", "--ignored", "--exclude-standard", place=place))


def code_state(run: RunDir) -> CodeState:
    """Return the origin of a run's code from `environment.json`. Raises RunFolderError if the file is missing."""
    facts = read_record(run.environment)
    if facts is None:
        raise RunFolderError(f"run {run.name} is incomplete (no environment.json): remove {run.path}")
    raw = facts.get("code")
    if not isinstance(raw, dict):
        raw = {}
    code = fill(CodeState, raw, run.environment)
    if not code.copied:
        return code
    for folder in [code.cwd, *code.sources]:
        # `cwd` is an absolute path, and `sources` are paths below `root`.
        must_be_absolute = folder not in code.sources
        if ".." in Path(folder).parts or Path(folder).is_absolute() != must_be_absolute:
            raise RunFolderError(f"{run.environment} is damaged: {folder} is not a folder of code")
    return code


def import_path(code: CodeState, run: RunDir) -> list[str]:
    """Return the first entries of PYTHONPATH: the snapshot's copy of the working directory, its root, its sources."""
    if not code.copied:
        return []
    cwd = Path(code.cwd)
    folders = [run.code, *(run.code / name for name in code.sources)]
    if cwd.is_relative_to(code.root):
        folders.insert(0, run.code / cwd.relative_to(code.root))
    else:
        folders.append(cwd)
    return list(dict.fromkeys(map(str, folders)))


def changed_files(code: CodeState, run: RunDir) -> list[str]:
    """Return the files of the copy that differ from their originals now, by their path below `root`."""
    if not code.copied:
        return []
    changed = []
    for name in read_code_files(run):
        copy = run.code / name
        original = Path(code.root) / name
        if copy.is_file() and original.is_file() and not filecmp.cmp(copy, original):
            changed.append(name)
    return changed


def _files_below(folder: Path) -> list[Path]:
    """Return all files below a folder without links, in the order of their paths."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def write_environment(run: RunDir, code: CodeState, **facts: Any) -> None:
    """Record machine, versions and origin of the code in `environment.json`, but no environment variables.

    The digests of the copied files are recorded in `code-files.json`, before a rank can write to the copy.
    """
    arguments = redact_words([redacted_argument(argument) for argument in sys.argv[1:]])
    digest = None
    if code.copied:
        digests = file_digests(run.code)
        write_json(run.code_files, {"sha256": digests})
        digest = code_digest(digests)
    write_json(
        run.environment,
        {
            "host": socket.gethostname(),
            "user": user_name(),
            "command": " ".join(["hpcdist", *map(str, arguments)]),
            **machine_facts(),
            "git_commit": code.git_commit,
            "git_dirty": code.git_dirty if code.git_commit else None,
            "code_digest": digest,
            "code": asdict(code),
            **facts,
        },
    )


def file_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of all files in a copy of code, without its links, by their path below it."""
    digests = {}
    for path in _files_below(folder):
        digests[path.relative_to(folder).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def code_digest(digests: Mapping[str, str]) -> str:
    """Return a 12-digit digest of the names and contents of files."""
    digest = hashlib.sha256()
    for name, content in digests.items():
        digest.update(name.encode(errors="surrogateescape") + b"\0" + bytes.fromhex(content))
    return digest.hexdigest()[:12]


def read_code_files(run: RunDir) -> dict[str, str]:
    """Return the SHA-256 of the files of a run's snapshot by their path below `root`; empty if it has none.

    Raises RunFolderError if the record is damaged.
    """
    record = read_record(run.code_files)
    if record is None:  # the run was created by an earlier version of hpcdist
        return file_digests(run.code)
    digests = record.get("sha256")
    if not isinstance(digests, dict):
        raise RunFolderError(f"{run.code_files} is damaged (it has no sha256): remove it")
    return {str(name): str(digest) for name, digest in digests.items()}


def machine_facts() -> dict[str, Any]:
    """Return platform, cores, versions, and a digest of hpcdist's source files, as `environment.json` holds them."""
    from importlib import metadata  # slow to import, and not needed in jobs

    installed = installed_versions()  # of torch with its build, such as `2.11.0+cu130`, which its metadata may lack
    versions: dict[str, str] = {name: installed[name] for name in ("hpcdist", "torch", "driver") if name in installed}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "platform": platform.platform(),
        "cores": machine.num_cores(),
        "cpu": machine.cpu_name(),
        "python": platform.python_version(),
        "versions": versions,
        "source_digest": installed["source"],
    }


def _plain_files(top: Path, is_foreign: Callable[[Path], bool]) -> list[Path]:
    """Return the files below `top`, without hidden and ignored ones. The walk skips hidden and foreign folders."""
    files = []
    ignored = _ignored(top)
    for folder, subfolders, names in os.walk(top):
        here = Path(folder)
        shown = [name for name in subfolders if not name.startswith(".") and name != "__pycache__"]
        subfolders[:] = [name for name in shown if not is_foreign(here / name)]
        # os.walk lists links to folders among the subfolders, and does not follow them.
        links = [name for name in subfolders if (here / name).is_symlink()]
        files += [here / name for name in names + links if not name.startswith(".")]
    return [path for path in files if path not in ignored]


def _copy(top: Path, files: list[Path], target: Path, *, in_git: bool) -> None:
    """Copy files below `top` to the same places below `target`. Raises UserMistake beyond MAX_CODE_MB."""
    sizes: dict[Path, int] = {}
    for path in files:
        with suppress(FileNotFoundError, NotADirectoryError):  # it has vanished
            sizes[path] = path.lstat().st_size
    total = sum(sizes.values())
    if total > MAX_CODE_MB * MB:
        by_size = sorted(sizes.items(), key=lambda item: -item[1])
        largest = ", ".join(f"{path.relative_to(top)} ({size / MB:.1f} MB)" for path, size in by_size[:3])
        remove = ""
        if in_git:
            remove = ", and remove them from git with `git rm --cached`"
        raise UserMistake(
            f"the code under {top} has {total / MB:.1f} MB, more than {MAX_CODE_MB} MB (largest: {largest}): name data"
            f" and outputs in .gitignore{remove} (the copy then has links to them)"
        )
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in sizes:
        copy = target / path.relative_to(top)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError, NotADirectoryError):
            shutil.copy2(path, copy, follow_symlinks=False)
