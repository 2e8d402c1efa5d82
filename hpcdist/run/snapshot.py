"""The code of a run: the tree that holds it, its snapshot, its origin, its copy for a run like it."""

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
from collections.abc import Callable, Collection, Sequence
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
from hpcdist.errors import RunFolderError, UserMistake
from hpcdist.host import machine
from hpcdist.host.files import write_atomic
from hpcdist.host.json_files import fill, parse_json, write_json
from hpcdist.host.versions import versions as installed_versions
from hpcdist.run.folder import DATABASE, RunDir, read_record
from hpcdist.run.lease import user_name

log = logging.getLogger(__name__)

# The tree that holds the code of a run.

#: Options of `git ls-files` for files that git neither tracks nor ignores.
UNTRACKED = ("--others", "--exclude-standard")


def _git_env() -> dict[str, str]:
    """Return the environment without the variables of a hook of git, which would name another repository."""
    names = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    return {name: value for name, value in os.environ.items() if name not in names}


def git_output(folder: Path, *arguments: str) -> str:
    """Return the output of a git command; empty if git is missing or fails (no commit yet, another owner)."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=False, env=_git_env())
    except FileNotFoundError:
        return ""
    return done.stdout.decode(errors="surrogateescape") if done.returncode == 0 else ""


def git_root(cwd: Path) -> Path | None:
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


def own_module(config: Config) -> str:
    """Return the top package of the user's module: of the trainer, or that a shipped trainer imports; "" if none."""
    if config.trainer.script:
        return config.trainer.script_name.partition(".")[0]
    named = config.trainer.target
    if (trainer := find_trainer(named)) is not None:
        named = str(getattr(config.sections[named], trainer.module_key)) if trainer.module_key else ""
    module, colon, _ = named.partition(":")
    return module.partition(".")[0] if colon else ""


def trainer_place(config: Config, path: Sequence[str]) -> Path | None:
    """Return the script, or file or folder of the user's module, first in `path`; None if installed or missing."""
    if file := config.trainer.script_file:
        return file.parent.resolve() / file.name
    module = own_module(config)
    if not module or (spec := find_module(module, path)) is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    place = Path(folders[0] if folders else spec.origin or "").resolve()
    return None if {"site-packages", "dist-packages"} & {*place.parts} or not place.exists() else place


def is_own(config: Config) -> bool:
    """Return whether the ranks run code of the user's: a script, a function of a module, or a module that it names."""
    return bool(config.trainer.script or own_module(config))


def find_tree(config: Config, cwd: Path) -> tuple[Path, Path | None, bool]:
    """Return the top of the trainer's code, else `cwd`; the top of its git work tree; and whether it is copied."""
    if is_own(config):
        place = trainer_place(config, [str(cwd)])
        root = (git_root(place.parent) if place is not None else None) or git_root(cwd)
        return root or cwd, root, True
    package = Path(hpcdist.__file__).resolve()
    root = git_root(package.parent) if git_paths(package.parent, "--cached", *UNTRACKED, package.name) else None
    copied = root is not None and cwd.is_relative_to(root)
    return root if copied and root else cwd, root, copied


def import_roots(top: Path, files: Collection[Path]) -> list[str]:
    """Return the folders of a tree in which this Python finds modules: `src` of an editable install, for example."""
    folders = {folder for file in files for folder in file.parents if top in folder.parents}
    found = [Path(entry).resolve() for entry in sys.path if entry]
    packages = {file.parent for file in files if file.name == "__init__.py"}
    for package in sorted(packages):
        if package.parent not in packages and (spec := find_module(package.name, [])) is not None and spec.origin:
            found += [package.parent] * (Path(spec.origin).resolve() == package / "__init__.py")
    return [folder.relative_to(top).as_posix() for folder in dict.fromkeys(found) if folder in folders]


# Files of a tree that are no code.


def foreign(runs_dir: Path, cwd: Path, top: Path) -> Callable[[Path], bool]:
    """Return a function that returns whether a path below `top` is no code but of runs, hpcdist or an environment."""
    runs_dir = runs_dir.resolve()  # paths from git contain no symbolic links

    @cache
    def is_foreign(path: Path) -> bool:
        if path == top:
            return False
        if is_foreign(path.parent) or (path == runs_dir and not cwd.is_relative_to(path)):
            return True
        if not path.is_dir():
            return path.name.startswith(DATABASE)
        return (
            (path / "pyvenv.cfg").exists()
            or ((path / "state.json").exists() and (path / "attempts").is_dir())
            or path.name.startswith(".hpcdist-")
            or ((path / "sweep.json").exists() and any(path.parent.glob(f"{path.name}-*/cell.json")))
        )

    return is_foreign


# Snapshot of a run's code in its folder, and the description of its origin in `environment.json`.

_PACKAGES = ("torchvision", "numpy", "mlflow", "omegaconf", "submitit")
MB = 2**20
#: A larger project folder has data or outputs in it, which each run would copy.
MAX_CODE_MB = 200
#: Limit of the untracked files that are recorded by name.
MAX_UNTRACKED = 50
#: Limit of the links from a copy to what it leaves out.
MAX_LINKS = 1000


@dataclass(frozen=True, kw_only=True)
class CodeState:
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

    The code is the git work tree that holds the trainer, without ignored files, else all files below `cwd`, without
    hidden files and those that `.gitignore` excludes. Runs and virtual environments are left out. Links in the copy
    lead to everything else. The code of a shipped trainer is copied only if hpcdist itself is in the tree of `cwd`.
    """
    top, root, copied = find_tree(config, cwd)
    commit = git_output(root, "rev-parse", "HEAD").strip() or None if root else None
    patch = ""
    changed: list[str] = []
    if root is not None and commit:
        options = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "HEAD")
        patch = git_output(root, "diff", "--binary", *options)
        changed = [name for name in git_output(root, "diff", "--name-only", "-z", *options).split("\0") if name]
    if patch:
        write_atomic(run.patch, patch.encode(errors="surrogateescape"))
    else:
        run.patch.unlink(missing_ok=True)
    new = set(git_paths(root, *UNTRACKED)) if root and copied else set()
    kept: list[Path] = []
    if copied:
        is_foreign = foreign(Path(config.runs_dir), cwd, top)
        # git also lists deleted files, and submodules as folders.
        listed = git_paths(root, "--cached", *UNTRACKED) if root else _plain_files(top, is_foreign)
        files = [path for path in listed if path.is_symlink() or path.is_file()]  # a link may be dangling
        kept = [path for path in files if not is_foreign(path)]
        _copy(top, kept, run.code, config)
        _link_rest(top, kept, run.code, is_foreign)
    untracked = [path.relative_to(top).as_posix() for path in kept if path in new]
    code = CodeState(
        cwd=str(cwd),
        root=str(top),
        git_commit=commit,
        git_dirty=bool(root and git_output(root, "status", "--porcelain", "--untracked-files=no")),
        copied=copied,
        changed=changed,
        untracked=untracked[:MAX_UNTRACKED],
        num_untracked=len(untracked),
        sources=import_roots(top, kept),
        no_commit="" if commit else _why_no_commit(top, root),
    )
    return replace(code, live=_live(config, run, code)) if is_own(config) else code


def _why_no_commit(top: Path, root: Path | None) -> str:
    if root is not None:
        return "its git repository had no commit yet"
    if not any(os.path.lexists(folder / ".git") for folder in (top, *top.parents)):
        return "it was not in a git repository"
    if shutil.which("git") is None:
        return "git is not installed"
    return "git could not read its repository"  # it belongs to another user, for example


def take_from(original: RunDir, config: Config, run: RunDir, cwd: Path) -> CodeState:
    """Copy the code and the patch of another run. Code that it has not copied is taken as that of any new run.

    Raises UserMistake if its copy of the code is gone.
    """
    code = code_state(original)
    if not code.copied:
        return take(config, run, cwd)
    if not original.code.is_dir():
        back = f"restore the code in {code.root}"
        if code.git_commit:
            back = f"`git checkout {code.git_commit}` in {code.root}"
        raise UserMistake(
            f"the copy of the code of run {original.name} is gone: {original.code} does not exist; {back}, then"
            f" `hpcdist run {original.config} name=NEW`"
        )
    shutil.copytree(original.code, run.code, symlinks=True)
    if original.patch.is_file():
        shutil.copyfile(original.patch, run.patch)
    return code


def _link_rest(top: Path, files: Sequence[Path], target: Path, is_foreign: Callable[[Path], bool]) -> None:
    """Link what the copy leaves out: data, by a path relative to `__file__`, and modules that a build generates."""
    links = 0
    for folder in sorted({top, *(folder for file in files for folder in file.parents if top in folder.parents)}):
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
    place = trainer_place(config, import_path(code, run))
    live = []
    if place is not None and run.copy_in(code.root, place) is None and not place.is_relative_to(run.code.resolve()):
        live.append(str(place))
        name = place.name if config.trainer.script else own_module(config)
        log.warning("%s is imported from %s, not from a copy: later edits of it change the run", name, place)
    if config.container.runtime == "none" and config.cluster.environment.kind == "none":  # ranks have this Python
        from importlib import metadata  # slow to import

        for distribution in metadata.distributions():
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                origin = parse_json((distribution.read_text("direct_url.json") or "").encode())
                folder = Path(unquote(urlsplit(origin["url"]).path))
                if origin["dir_info"]["editable"] and not folder.resolve().is_relative_to(code.root):
                    live += [str(folder)] * (distribution.name != "hpcdist")
    return list(dict.fromkeys(live))


def _ignored(top: Path) -> set[Path]:
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
    code = facts.get("code")
    found = fill(CodeState, code if isinstance(code, dict) else {}, run.environment)
    for folder in [found.cwd, *found.sources] if found.copied else []:
        if ".." in Path(folder).parts or Path(folder).is_absolute() == (folder in found.sources):
            raise RunFolderError(f"{run.environment} is damaged: {folder} is not a folder of code")
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
            "git_dirty": code.git_dirty if code.git_commit else None,
            "code_digest": code_digest(run.code) if code.copied else None,
            "code": asdict(code),
            **facts,
        },
    )


def code_digest(folder: Path) -> str:
    """Return a 12-digit digest of the names and contents of all files in a copy of code, without its links."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        name = path.relative_to(folder).as_posix().encode(errors="surrogateescape")
        found.update(name + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:12]


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
    files, ignored = [], _ignored(top)
    for folder, subfolders, names in os.walk(top):
        here = Path(folder)
        shown = [name for name in subfolders if not name.startswith(".") and name != "__pycache__"]
        subfolders[:] = [name for name in shown if not is_foreign(here / name)]
        # os.walk lists links to folders among the subfolders, and does not follow them.
        links = [name for name in subfolders if (here / name).is_symlink()]
        files += [here / name for name in names + links if not name.startswith(".")]
    return [path for path in files if path not in ignored]


def _copy(top: Path, files: list[Path], target: Path, config: Config) -> None:
    sizes: dict[Path, int] = {}
    for path in files:
        with suppress(FileNotFoundError, NotADirectoryError):  # it has vanished
            sizes[path] = path.lstat().st_size
    total = sum(sizes.values())
    if total > MAX_CODE_MB * MB:
        three = sorted(sizes.items(), key=lambda item: -item[1])[:3]
        largest = ", ".join(f"{path.relative_to(top)} ({size / MB:.1f} MB)" for path, size in three)
        raise UserMistake(
            f"the code under {top} has {total / MB:.1f} MB, more than {MAX_CODE_MB} MB (largest: {largest}): name data"
            " and outputs in .gitignore (the copy then has links to them)"
        )
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in sizes:
        copy = target / path.relative_to(top)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError, NotADirectoryError):
            shutil.copy2(path, copy, follow_symlinks=False)
