"""Code snapshots of git work trees and of plain folders."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import hpcdist
from hpcdist.config.cluster_schema import ContainerConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import TrainerConfig
from hpcdist.errors import UserMistake
from hpcdist.run import snapshot
from hpcdist.run.create import check_trainer, create_run
from hpcdist.run.folder import RunDir
from hpcdist.run.snapshot import (
    CodeState,
    code_digest,
    file_digests,
    import_path,
    own_module,
    take,
    take_from,
    write_environment,
)
from hpcdist.trainers.rl import RlConfig

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

Git = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "elsewhere" / "exp" / "first")


def config(run: RunDir, **changes: Any) -> Config:
    default = Config(trainer=TrainerConfig(target="train:train"), runs_dir=str(run.path.parent.parent))
    return replace(default, **changes)


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text)


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


@pytest.mark.parametrize(
    ("changes", "module"),
    [
        ({"trainer": TrainerConfig(target="pack.train:train")}, "pack"),
        ({"trainer": TrainerConfig(script=["-m", "pack.train"])}, "pack"),
        ({"trainer": TrainerConfig(target="ddp")}, ""),
        ({"trainer": TrainerConfig(target="rl"), "sections": {"rl": RlConfig(env_id="CartPole-v1")}}, ""),
        ({"trainer": TrainerConfig(target="rl"), "sections": {"rl": RlConfig(env_id="pack.maze:Maze-v0")}}, "pack"),
    ],
)
def test_code_of_a_module_that_the_config_names_is_copied(
    changes: dict[str, Any], module: str, project: Path, run: RunDir
) -> None:
    write(project, pack____init__="", pack__maze="1")
    given = config(run, **changes)
    assert own_module(given) == module
    assert take(given, run, project).copied == bool(module)
    assert (run.code / "pack" / "maze.py").is_file() == bool(module)


# --- git work trees


def test_all_files_but_ignored_ones_are_copied(project: Path, git: Git, run: RunDir) -> None:
    write(project, train="1", kept="same", gone="bye", pkg__model="2", ignored="x")
    (project / ".gitignore").write_text("ignored.py\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    write(project, train="changed", new="untracked")
    (project / "gone.py").unlink()
    (project / "späte\nZeile .yaml").write_text("unusual name")

    code = take(config(run), run, project)

    assert code == CodeState(
        cwd=str(project),
        root=str(project),
        git_commit=git("rev-parse", "HEAD").strip(),
        git_dirty=True,
        copied=True,
        changed=["gone.py", "train.py"],
        untracked=["new.py", "späte\nZeile .yaml"],
        num_untracked=2,
    )
    assert contents(run.code) == {
        ".gitignore": "ignored.py\n",
        "kept.py": "same",
        "new.py": "untracked",
        "pkg/model.py": "2",
        "späte\nZeile .yaml": "unusual name",
        "train.py": "changed",
    }
    patch = (run.path / "code.patch").read_text()
    assert "+changed" in patch
    assert "deleted file mode" in patch
    assert "untracked" not in patch


def test_clean_tree_has_no_patch_despite_new_files(project: Path, git: Git) -> None:
    write(project, train="1")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    run = RunDir.create(project / "runs" / "exp" / "first")
    (project / "runs" / "mlflow.db").touch()
    code = take(config(run), run, project)
    assert (code.git_dirty, code.num_untracked) == (False, 0)
    assert not (run.path / "code.patch").exists()
    write(project, train="2")
    assert take(config(run), run, project).git_dirty
    before = (run.path / "code.patch").read_bytes()
    write(project, train="4")
    with pytest.MonkeyPatch.context() as full:
        full.setattr(snapshot, "write_atomic", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            take(config(run), run, project)
    assert (run.path / "code.patch").read_bytes() == before  # that of the code in the run folder
    write(project, train="1", new="3")
    code = take(config(run), run, project)
    assert (code.git_dirty, code.untracked) == (False, ["new.py"])
    assert not (run.path / "code.patch").exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"x = 'a'\n", "x = 'größe'\n".encode("latin-1")), (b"\x00\x01binary\xff" * 99, b"\x00\x02binary\xfe" * 99)],
    ids=["latin-1", "binary"],
)
def test_patch_applied_to_the_commit_gives_the_code(
    project: Path, git: Git, run: RunDir, before: bytes, after: bytes
) -> None:
    git("config", "color.ui", "always")
    git("config", "diff.external", "false")
    (project / "data").write_bytes(before)
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    (project / "data").write_bytes(after)
    take(config(run), run, project)
    git("checkout", "--quiet", ".")
    git("apply", str(run.path / "code.patch"))
    assert (project / "data").read_bytes() == after


def test_failing_diff_is_reported_with_the_changed_files(
    project: Path, git: Git, run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    (project / ".gitattributes").write_text("*.bin filter=lfs\n")
    (project / "data.bin").write_text("old")
    git("add", "-A")
    git("commit", "--quiet", "-m", "data")
    git("config", "filter.lfs.required", "true")
    git("config", "filter.lfs.clean", "no-such-program")
    (project / "data.bin").write_text("newer")
    state = take(config(run), run, project)
    assert (state.git_dirty, state.changed) == (True, ["data.bin"])
    assert "`git diff HEAD` fails, so the run folder gets no code.patch with the uncommitted changes of data.bin" in (
        caplog.text
    )
    assert not (run.path / "code.patch").exists()


def test_change_that_is_staged_and_undone_is_none(
    project: Path, git: Git, run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    write(project, train="1")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    write(project, train="2")
    git("add", ".")
    write(project, train="1")
    state = take(config(run), run, project)
    assert (state.git_dirty, state.changed, caplog.messages) == (False, [], [])


def test_nested_repository_is_left_out(project: Path, git: Git, run: RunDir) -> None:
    """git lists submodules and nested checkouts as one folder."""
    write(project, train="1", vendor__tool="2")
    git("init", "--quiet", cwd=project / "vendor")
    git("add", ".", cwd=project / "vendor")
    git("commit", "--quiet", "-m", "tool", cwd=project / "vendor")
    for _ in range(2):
        code = take(config(run), run, project)
        assert (code.git_commit, code.root) == (None, str(project))
        assert set(contents(run.code)) == {"train.py"}
        git("-c", "advice.addEmbeddedRepo=false", "add", ".")  # adds a gitlink to the index
    assert not (run.path / "code.patch").exists()


def test_successive_runs_in_one_tree_have_the_same_snapshot(project: Path, in_git: bool) -> None:
    """Runs from several folders have several folders of runs, sweeps and databases among them."""
    write(project, train="1", part__train="2")
    (project / "part" / "sweep.json").write_text("{}")  # a file of the user
    sizes = []
    for number in range(6):
        runs_dir = (project, project / "part")[number % 2] / "runs"
        run = RunDir.create(runs_dir / "exp" / f"run-{number}")
        write(run.path / "artifacts", output="x" * 1000)
        for name in ("grid/sweep.json", "grid-1/cell.json", "grid-1/state.json", "grid-1/attempts/x"):
            (runs_dir / "exp" / name).parent.mkdir(parents=True, exist_ok=True)
            (runs_dir / "exp" / name).touch()
        for name in ("mlflow.db", "mlflow.db-wal"):
            (runs_dir / name).parent.mkdir(exist_ok=True)
            (runs_dir / name).write_text("x" * 1000)
        code = take(config(run), run, project / "part" if in_git else project)
        sizes.append(contents(run.code))
    assert sizes == [{"train.py": "1", "part/train.py": "2", "part/sweep.json": "{}"}] * 6
    assert code.num_untracked == (3 if in_git else 0)


def test_files_that_vanish_during_the_copy_are_left_out(
    project: Path, run: RunDir, in_git: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, train="1", early="2", late="3", sub__folder="4")
    find, copy = snapshot._copy, shutil.copy2

    def _copy(*arguments: Any, **options: Any) -> None:
        (project / "early.py").unlink()
        find(*arguments, **options)

    def copy2(source: Path, target: Path, **options: Any) -> None:
        (project / "late.py").unlink(missing_ok=True)
        shutil.rmtree(project / "sub", ignore_errors=True)
        (project / "sub").touch()
        copy(source, target, **options)

    monkeypatch.setattr(snapshot, "_copy", _copy)
    monkeypatch.setattr("shutil.copy2", copy2)
    take(config(run), run, project)
    assert contents(run.code) == {"train.py": "1"}


def test_symbolic_links_are_copied_as_links(project: Path, run: RunDir, in_git: bool) -> None:
    write(project, src__pkg__model="1")
    (project / "model.py").symlink_to("src/pkg/model.py")
    (project / "pkg").symlink_to("src/pkg")
    (project / "dangling").symlink_to("no/such/file")
    take(config(run), run, project)
    assert os.readlink(run.code / "model.py") == "src/pkg/model.py"
    assert (run.code / "model.py").read_text() == "1"
    assert (run.code / "pkg").is_symlink()
    assert (run.code / "pkg" / "model.py").read_text() == "1"
    assert os.readlink(run.code / "dangling") == "no/such/file"


def test_reason_of_a_missing_commit_is_recorded(
    project: Path, git: Git, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, train="1")
    code = take(config(run), run, project)
    assert (code.git_commit, code.no_commit) == (None, "its git repository had no commit yet")
    shutil.rmtree(run.code)
    (project / ".git" / "HEAD").write_text("damaged")
    assert take(config(run), run, project).no_commit == "git could not read its repository"
    shutil.rmtree(run.code)
    monkeypatch.setenv("PATH", "/nowhere")
    assert take(config(run), run, project).no_commit == "git is not installed"


# --- plain folders


def test_copy_of_a_plain_folder_omits_hidden_files(project: Path, run: RunDir) -> None:
    write(project, train="1", pkg__model="2", pkg__hidden="3", env__lib__torch="4", cache="5")
    (project / "pkg" / "hidden.py").rename(project / "pkg" / ".hidden.py")
    (project / "env" / "pyvenv.cfg").touch()
    (project / "__pycache__").mkdir()
    (project / "__pycache__" / "x.pyc").touch()
    os.mkfifo(project / "fifo")
    code = take(config(run), run, project)
    assert code == CodeState(
        cwd=str(project), root=str(project), git_commit=None, git_dirty=False, copied=True, num_untracked=0,
        no_commit="it was not in a git repository",
    )  # fmt: skip
    assert set(contents(run.code)) == {"train.py", "pkg/model.py", "cache.py"}
    assert not (run.path / "code.patch").exists()
    assert import_path(code, run) == [str(run.code)]
    before = file_digests(run.code)
    (run.code / "link").symlink_to(project / "missing")
    assert file_digests(run.code) == before
    (run.code / "cache.py").write_text("6")
    assert code_digest(file_digests(run.code)) != code_digest(before)


# --- outputs and data beside the code


def write_outputs(folder: Path) -> None:
    """Write what training scripts write beside themselves."""
    for name in ("model.pt", "train.log", "loss.txt", "metrics.csv", "runs.out.tfevents.1.host.2", "notes.JSONL"):
        (folder / name).write_text("an output")
    for name in ("config.json", "README.md", "args.yaml", "model.safetensors", "rng"):
        path = folder / "out" / "checkpoint-500" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("an output")
    (folder / "annotations.json").write_text("x" * (2**20 + 1))


@pytest.mark.usefixtures("in_git")
def test_outputs_of_a_script_do_not_change_its_snapshot(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_CODE_MB", 0.001)
    write(project, train="1", pkg__model="2")
    for name in ("base.yaml", "requirements-dev.txt", "Makefile", "conf/small.json", "conf/README.md"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("code")
    first, second = (RunDir.create(project / "runs" / "exp" / name) for name in ("first", "second"))
    write_environment(first, take(config(first), first, project))
    write_outputs(project)
    write_outputs(project / "pkg")
    write_environment(second, take(config(second), second, project))
    files = {"train.py", "pkg/model.py", "base.yaml", "requirements-dev.txt", "Makefile", "conf/small.json"}
    assert set(contents(second.code)) == {*files, "conf/README.md"}
    digests = [json.loads(run.environment.read_text())["code_digest"] for run in (first, second)]
    assert digests[0] == digests[1]
    assert (second.code / "model.pt").readlink() == project / "model.pt"
    assert (second.code / "pkg" / "out").readlink() == project / "pkg" / "out"


def test_files_that_git_tracks_are_code_whatever_their_name(project: Path, git: Git, run: RunDir) -> None:
    write(project, train="1")
    (project / "vocabulary.csv").write_text("a")
    git("add", ".")
    (project / "loss.csv").write_text("b")
    take(config(run), run, project)
    assert set(contents(run.code)) == {"train.py", "vocabulary.csv"}


def test_script_with_an_unusual_ending_is_copied(project: Path, run: RunDir) -> None:
    (project / "train.exp3").write_text("1")
    take(config(run, trainer=TrainerConfig(script=[str(project / "train.exp3")])), run, project)
    assert set(contents(run.code)) == {"train.exp3"}


@pytest.mark.usefixtures("in_git")
def test_runs_of_other_working_folders_are_left_out(project: Path, run: RunDir) -> None:
    write(project, train="1", other__train="2")
    other = RunDir.create(project / "other" / "results" / "exp" / "first")
    write(other.path, copied="3")
    for name in ("results/mlflow.db", "results/exp/grid.yaml", "mlflow.db", "mlartifacts/1/config.yaml", "mlruns/x.py"):
        (project / "other" / name).parent.mkdir(parents=True, exist_ok=True)
        (project / "other" / name).write_text("x")
    take(config(run), run, project)
    assert set(contents(run.code)) == {"train.py", "other/train.py"}
    assert sorted(os.listdir(run.code / "other")) == ["train.py"]


def test_new_run_gets_no_outputs_from_the_copy_of_another(project: Path, run: RunDir) -> None:
    """A script that writes beside `__file__` writes to the copy of its run."""
    write(project, train="1")
    write_environment(run, take(config(run), run, project))
    (run.code / "results.json").write_text("{}")
    (run.code / "out").mkdir()
    (run.code / "out" / "model.pt").touch()
    second = RunDir.create(run.path.parent / "second")
    take_from(run, config(second), second, project)
    assert set(contents(second.code)) == {"train.py"}
    assert file_digests(second.code) == snapshot.read_code_files(run)


# --- conditions and limits


def test_shipped_trainer_has_the_commit_of_hpcdist_and_no_copy(
    project: Path, git: Git, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, site__hpcdist__main="1")
    write(tmp_path / "user", train="1")
    monkeypatch.setattr(hpcdist, "__file__", str(project / "site" / "hpcdist" / "main.py"))

    def code() -> CodeState:
        return take(config(run, trainer=TrainerConfig()), run, tmp_path / "user")

    (project / ".gitignore").write_text("site\n")  # such as the site-packages of an environment in the project
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    assert (code().git_commit, code().git_dirty, code().copied) == (None, False, False)
    git("add", "--force", ".")
    git("commit", "--quiet", "-m", "second")
    assert (code().git_commit, code().git_dirty) == (git("rev-parse", "HEAD").strip(), False)
    assert not (run.path / "code.patch").exists()
    write(project, site__hpcdist__main="2")
    assert code().git_dirty
    assert "+2" in (run.path / "code.patch").read_text()
    assert not run.code.exists()
    assert import_path(code(), run) == []


def test_error_for_too_much_code_names_the_largest_files(
    project: Path, git: Git, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MAX_CODE_MB", 1)
    write(project, train="1")
    for name, size_mb in (("a.bin", 0.2), ("b.bin", 0.6), ("c.bin", 0.4), ("d.bin", 0.3)):
        (project / name).write_bytes(b"\0" * int(size_mb * 2**20))
    git("add", ".")
    with pytest.raises(UserMistake) as caught:
        take(config(run), run, project)
    assert str(caught.value) == (
        f"the code under {project} has 1.5 MB, more than 1 MB"
        " (largest: b.bin (0.6 MB), c.bin (0.4 MB), d.bin (0.3 MB)): name data and outputs in .gitignore,"
        " and remove them from git with `git rm --cached` (the copy then has links to them)"
    )
    assert not run.code.exists()
    monkeypatch.setattr(snapshot, "MAX_CODE_MB", 2)
    take(config(run), run, project)


# --- the tree that holds the trainer


def test_script_of_another_folder_is_copied_with_its_own_tree(
    project: Path, git: Git, run: RunDir, tmp_path: Path
) -> None:
    write(project, deep__train="1", shared="2")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere, unrelated="3")
    (tmp_path / "link").symlink_to(project)
    for folder in (project, tmp_path / "link"):
        script = folder / "deep" / "train.py"
        code = take(config(run, trainer=TrainerConfig(script=[str(script)])), run, elsewhere)
        assert (code.root, code.git_commit) == (str(project), git("rev-parse", "HEAD").strip())
        assert set(contents(run.code)) == {"deep/train.py", "shared.py"}
        assert import_path(code, run) == [str(run.code), str(elsewhere)]
        snapshot.write_environment(run, code)
        assert run.snapshot_of(script) == run.code / "deep" / "train.py"


EDITABLE_FINDER = """\
import importlib.util

class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "pkg":
            return importlib.util.spec_from_file_location(name, {origin!r}, submodule_search_locations=[{folder!r}])
"""


@pytest.mark.parametrize("style", ["pth", "finder", "renamed"])
def test_editable_src_layout_is_imported_from_the_copy(
    project: Path,
    git: Git,
    run: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    style: str,
) -> None:
    name = "lib" if style == "renamed" else "pkg"  # `package_dir` of setuptools maps `pkg` to another folder
    trainer = "from pkg import _version\ndef train(ctx): ..."
    write(project, **{f"src__{name}____init__": "", f"src__{name}__train": trainer}, tests__x="")
    (project / "src" / name / "__init__.py").touch()
    (project / ".gitignore").write_text("_version.py\n")
    (project / "src" / name / "_version.py").write_text("")  # generated, such as by setuptools-scm
    if style == "pth":
        monkeypatch.syspath_prepend(str(project / "src"))
    else:
        found: dict[str, Any] = {}
        folder = project / "src" / name
        exec(EDITABLE_FINDER.format(origin=str(folder / "__init__.py"), folder=str(folder)), found)
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, found["Finder"]])
    cwd = tmp_path / "elsewhere" if style == "finder" else project
    wanted = config(run, trainer=TrainerConfig(target="pkg.train:train"))
    check_trainer(wanted, cwd)

    code = take(wanted, run, cwd)

    assert code.root == str(project)
    assert "src/" in " ".join(contents(run.code))
    paths = import_path(code, run)
    if style == "renamed":
        assert code.live == [str(project / "src" / "lib")]
        assert f"pkg is imported from {project / 'src' / 'lib'}, not from a copy" in caplog.text
        return
    assert str(run.code / "src") in paths
    assert (code.live, caplog.text) == ([], "")
    probe = "import pkg.train; print(pkg.__file__)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, str(project / "src")])}
    done = subprocess.run([sys.executable, "-P", "-c", probe], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(run.code / "src" / "pkg" / "__init__.py")


def test_editable_installs_outside_of_the_tree_are_live(
    project: Path, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, train="1")
    for name, folder in (("mylib", tmp_path / "my lib"), ("inside", project), ("hpcdist", tmp_path / "x")):
        info = tmp_path / "site" / f"{name}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        origin = {"url": folder.as_uri(), "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert str(tmp_path / "my lib") in take(config(run), run, project).live
    assert not {str(project), str(tmp_path / "x")} & {*take(config(run), run, project).live}


def test_what_the_copy_leaves_out_is_linked_to_the_original(project: Path, in_git: bool) -> None:
    write(project, train="1", pkg__model="2", pkg__cache__x="3", data__y="4", env__lib__torch="5")
    (project / "env" / "pyvenv.cfg").touch()
    (project / ".gitignore").write_text("data\ncache\nenv\n.env\n")
    (project / ".env").write_text("A_TOKEN=abcdef0123456789\n")
    run = RunDir.create(project / "runs" / "exp" / "first")
    take(config(run), run, project)
    links = {str(path.relative_to(run.code)): os.readlink(path) for path in run.code.rglob("*") if path.is_symlink()}
    links.pop(".gitignore", None)
    assert links == {
        "data": str(project / "data"),
        "pkg/cache": str(project / "pkg" / "cache"),
        ".env": str(project / ".env"),
    }
    assert (run.code / "data" / "y.py").read_text() == "4"


def test_many_files_that_are_left_out_are_not_linked_one_by_one(
    project: Path, git: Git, run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(project, train="1", data__keep="2")
    (project / ".gitignore").write_text("*.jpg\n")
    for number in range(9):
        (project / "data" / f"{number}.jpg").touch()
    monkeypatch.setattr(snapshot, "MAX_LINKS", 5)
    take(config(run), run, project)
    assert sum(path.is_symlink() for path in run.code.rglob("*")) <= 5
    assert f"over 5 files beside the code in {project} are neither copied nor linked" in caplog.text


# --- ignored files


def test_gitignore_of_a_plain_folder_is_obeyed(project: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project, train="1", sub__notes="2", big__a="4", big__b="5")
    (project / ".gitignore").write_text("# comment\nnotes.py\n/big/*\n!/big/b.py\n")
    take(config(run), run, project)
    assert set(contents(run.code)) == {"train.py", "big/b.py"}
    monkeypatch.setenv("PATH", "/nowhere")
    take(config(run), run, project)
    assert set(contents(run.code)) == {"train.py", "sub/notes.py", "big/a.py", "big/b.py"}


def test_folder_of_compiled_code_exists_for_containers(run: RunDir, tmp_path: Path) -> None:
    folder = run.path.parent.parent / ".hpcdist-compiled"
    create_run(config(run, experiment="exp", name="outside"), tmp_path)
    assert not folder.exists()
    in_container = config(run, experiment="exp", container=ContainerConfig(runtime="apptainer", image="/i.sif"))
    create_run(replace(in_container, name="inside"), tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    # A folder that cannot be made does not end the run.
    folder.rmdir()
    folder.symlink_to("/nowhere/else")
    create_run(replace(in_container, name="without"), tmp_path)
