"""Environments of ranks, from a virtual environment to its copy on a node: archive, copy, check, removal."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import hpcdist
from hpcdist.config.launch_schema import EnvironmentConfig
from hpcdist.environments import node_copy, packed
from hpcdist.environments.node_copy import CopyError, NodeRequest, prepare, start_python
from hpcdist.errors import UserMistake
from hpcdist.slurm.on_nodes import read_answers

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("zstd") is None, reason="needs zstd: apt-get install zstd"),
]


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with a module, a script, and the packages of these tests by a path file."""
    folder = tmp_path_factory.mktemp("original") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "own_module.py").write_text("PLACE = __file__\n")
    # An editable installation of hpcdist must not hide the copy of it.
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "tests.pth").write_text("\n".join(packages) + "\n")
    script = folder / "bin" / "own-script"
    script.write_text(f"#!{folder}/bin/python3\nimport sys, own_module\nprint(sys.prefix, own_module.PLACE)\n")
    script.chmod(0o755)
    return folder


Prepared = Callable[..., NodeRequest]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the installation of Python out of archives, which has thousands of files."""
    monkeypatch.setattr(packed.Interpreter, "is_packed", False)


@pytest.fixture
def prepared(venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """Return a function that packs an environment and returns the request for a node."""

    def make(*, with_python: bool = False, **changes: Any) -> NodeRequest:
        if not with_python:
            monkeypatch.setattr(packed.Interpreter, "is_packed", False)
        found = packed.pack(EnvironmentConfig(kind="venv", path=str(venv)), tmp_path / "runs", os.environ)
        return replace(request_of(found, tmp_path), **changes)

    return make


def copy_by(request: NodeRequest) -> None:
    node_copy.main([json.dumps(asdict(request))])


def request_of(found: packed.Packed, tmp_path: Path) -> NodeRequest:
    store = packed.store_of(tmp_path / "runs")
    folder = tmp_path / "disk" / "hpcdist-0"
    return NodeRequest(
        python=str(folder / found.key / "bin" / "python3"),
        sources=str(packed.copy_sources(store)),
        folder=str(folder),
        key=found.key,
        archive=found.path,
        sha256=found.sha256,
        prefix=found.prefix,
    )


def test_copy_on_a_node_is_complete_and_independent_of_the_original(
    prepared: Prepared, venv: Path, tmp_path: Path
) -> None:
    request = prepared(with_python=True)
    assert prepare(request)
    facts = start_python(request)
    assert (facts["python"], facts["hpcdist"]) == (".".join(map(str, sys.version_info[:3])), hpcdist.__version__)
    assert facts["missing"] == []
    copy = Path(request.folder) / request.key
    hidden = venv.with_name("hidden")
    venv.rename(hidden)
    try:
        done = subprocess.run([copy / "bin" / "own-script"], capture_output=True, text=True, check=True)
    finally:
        hidden.rename(venv)
    prefix, place = done.stdout.split()
    assert prefix == str(copy)
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        assert (copy / "bin" / "python3").resolve().is_relative_to(copy / "base")
    assert place.startswith(f"{copy}/lib/")
    assert Path(request.folder).stat().st_mode & 0o777 == 0o700
    # The second process on the node finds the copy.
    changed = (copy / "pyvenv.cfg").stat().st_mtime_ns
    assert not prepare(request)
    assert (copy / "pyvenv.cfg").stat().st_mtime_ns == changed


def test_incomplete_copy_is_made_again(prepared: Prepared) -> None:
    request = prepared()
    prepare(request)
    copy = Path(request.folder) / request.key
    (module,) = copy.glob("lib/python*/site-packages/own_module.py")
    module.unlink()  # as by a program that cleans up /tmp
    partial = copy.with_name(".partial-1")
    partial.mkdir()
    assert prepare(request)
    assert module.exists()
    assert not partial.exists()
    module.write_text("cut")
    assert prepare(request)
    (Path(request.folder) / f"{request.key}.files").unlink()
    assert prepare(request)
    # Python and its users write caches into an environment.
    (copy / "cache").write_text("x")
    assert not prepare(request)


def test_damaged_archive_is_refused(prepared: Prepared) -> None:
    request = prepared()
    with pytest.raises(
        CopyError, match=r"has another content \(sha256 \w+…\) than when the run was submitted"
    ) as found:
        prepare(replace(request, sha256="0" * 64))
    assert not found.value.may_pass
    assert not (Path(request.folder) / request.key).exists()
    content = bytearray(Path(request.archive).read_bytes())
    content[len(content) // 2] ^= 0xFF
    Path(request.archive).write_bytes(content)
    with pytest.raises(CopyError):
        prepare(request)
    assert [path.name for path in Path(request.folder).iterdir()] == ["lock"]


def test_unused_copies_are_removed_unless_a_process_uses_them(prepared: Prepared) -> None:
    request = prepared()
    folder = Path(request.folder)
    for name in ("old", "running", "fresh"):
        (folder / name / "bin").mkdir(parents=True)
        packed.write_listing(folder / name, folder / f"{name}.files")
        if name != "fresh":
            os.utime(folder / f"{name}.files", (0, 0))
    (folder / "interrupted").mkdir()
    folder.chmod(0o700)
    os.symlink(sys.executable, folder / "running" / "bin" / "python3")
    process = subprocess.Popen([folder / "running" / "bin" / "python3", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        prepare(request)
    finally:
        process.communicate(b"\n")
    left = {path.name for path in folder.iterdir() if path.is_dir()}
    assert left == {"running", "fresh", request.key, Path(request.sources).name}
    prepare(request)
    assert not (folder / "running").exists()


def test_local_folder_of_someone_else_is_refused(prepared: Prepared, tmp_path: Path) -> None:
    request = prepared()
    folder = Path(request.folder)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(CopyError, match=r"local_dir: others may write to"):
        prepare(request)
    folder.rmdir()
    folder.touch()
    with pytest.raises(CopyError, match=r"is not a folder of .* alone: remove it"):
        prepare(request)


def test_missing_programs_and_full_disks_are_named(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = prepared()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CopyError, match="zstd is not installed: install it, or use") as found:
        prepare(request)
    assert not found.value.may_pass
    (tmp_path / "zstd").write_text("#!/bin/sh\n")
    message = "tar: x: Cannot write: No space left on device"
    (tmp_path / "tar").write_text(f"#!/bin/sh\necho '{message}' >&2\necho 'tar: Exiting' >&2\nexit 2\n")
    for program in ("zstd", "tar"):
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    fix = "free space, or set cluster.environment.local_dir to a larger disk"
    with pytest.raises(CopyError, match=rf"cannot unpack .*\.tar\.zst: {message}: {fix}$") as found:
        prepare(request)
    assert not found.value.may_pass


def test_python_that_does_not_start_is_reported(prepared: Prepared, tmp_path: Path) -> None:
    request = prepared(folder="")
    with pytest.raises(CopyError, match="/no/python3 cannot be started: No such file or directory"):
        start_python(replace(request, python="/no/python3"))
    broken = tmp_path / "python3"
    broken.write_text("#!/bin/sh\necho 'error while loading libpython' >&2\nexit 127\n")
    broken.chmod(0o755)
    with pytest.raises(CopyError, match="does not start: error while loading libpython"):
        start_python(replace(request, python=str(broken)))


def test_answer_of_a_node(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setattr(node_copy.signal, "signal", lambda *_: None)
    request = prepared()
    copy_by(request)
    copy_by(request)
    first, second = capsys.readouterr().out.splitlines()
    answer = read_answers(f"noise\n{first}\n")["n7"]
    assert answer["copied"]
    assert not read_answers(second)["n7"]["copied"]
    copy_by(replace(request, key="other", archive="/no/archive.tar.zst"))
    answer = read_answers(capsys.readouterr().out)["n7"]
    assert (answer["error"], answer["may_pass"]) == ("No such file or directory: /no/archive.tar.zst", True)
    (tmp_path / "file").write_text("")
    copy_by(replace(request, folder=str(tmp_path / "file" / "own")))
    answer = read_answers(capsys.readouterr().out)["n7"]
    assert answer["error"].endswith(
        f"{tmp_path}/file/own: set cluster.environment.local_dir to a local disk with enough space"
    )
    assert not answer["may_pass"]


@pytest.mark.parametrize("facts", ["{]}", "{}"])
def test_odd_answers_of_a_python_are_clear_errors(facts: str, prepared: Prepared, tmp_path: Path) -> None:
    odd = tmp_path / "environment" / "bin" / "python3"
    odd.parent.mkdir(parents=True)
    odd.write_text(f"#!/bin/sh\n[ $1 = -I ] && echo '{facts}' || echo 'facts: {facts}'\n")
    odd.chmod(0o755)
    with pytest.raises(CopyError, match=f"{odd} gives no valid description of itself: "):
        start_python(replace(prepared(), python=str(odd)))
    with pytest.raises(UserMistake, match=r"cluster\.environment: .*python3 does not start: "):
        packed.interpreter(odd.parents[1])


def test_full_disk_while_hpcdist_is_copied(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_copy.signal, "signal", lambda *_: None)

    def full(source: str, target: Path) -> None:
        raise shutil.Error([(source, str(target), "[Errno 28] No space left on device: 'a'")])

    request = prepared()
    monkeypatch.setattr(node_copy.shutil, "copytree", full)
    copy_by(request)
    (answer,) = read_answers(capsys.readouterr().out).values()
    assert answer["error"].startswith("[Errno 28] No space left on device: 'a': ")
    assert not answer["may_pass"]


# --- archives


def test_python_of_the_system_is_not_packed() -> None:
    one = packed.Interpreter(base=Path("/usr"), executable=Path("/usr/bin/python3.12"), library="python3.12")
    assert not one.is_packed
    assert replace(one, base=Path("/usr/local"), executable=Path("/usr/local/bin/python3.12")).is_packed
    assert replace(one, base=Path("/apps/python"), executable=Path("/apps/python/bin/python3.12")).is_packed


def test_python_behind_a_symbolic_link_is_packed(tmp_path: Path) -> None:
    """As uv's cpython-3.12, or a home folder on another disk."""
    real, linked = tmp_path / "real", tmp_path / "linked"
    (real / "bin").mkdir(parents=True)
    linked.symlink_to(real)
    text = f"""#!{sys.executable}
import sys
sys.base_prefix, sys.executable = {str(linked)!r}, {str(linked / "bin" / "python3")!r}
exec(sys.argv[-1])
"""
    program = tmp_path / "bin" / "python3"
    program.parent.mkdir()
    program.write_text(text)
    program.chmod(0o755)
    assert packed.interpreter(tmp_path).base == real
    assert packed.interpreter(tmp_path).is_packed


def test_archive_that_cannot_be_written_leaves_no_file(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.tar.zst"
    monkeypatch.setattr(packed, "_COMPRESS", ("sh", "-c", "echo disk is full >&2; exit 1"))
    with pytest.raises(OSError, match=r"cannot write .*a\.tar\.zst: disk is full"):
        packed.write_archive(venv, packed.interpreter(venv), target)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(packed.shutil, "which", lambda _: None)
    with pytest.raises(UserMistake, match="packing needs the program zstd"):
        packed.write_archive(venv, packed.interpreter(venv), target)


# --- the packed environments of a runs_dir


@pytest.mark.usefixtures("small")
def test_environment_is_packed_again_only_after_a_change(venv: Path, tmp_path: Path) -> None:
    environment = EnvironmentConfig(kind="venv", path=str(venv))
    first = packed.pack(environment, tmp_path, os.environ)
    written = Path(first.path).stat().st_mtime_ns
    (cache := venv / "bin" / "__pycache__").mkdir()
    (cache / "x.pyc").touch()
    assert packed.pack(environment, tmp_path, os.environ) == first
    assert Path(first.path).stat().st_mtime_ns == written
    assert packed.touch(first, tmp_path)
    added = venv / "bin" / "added"
    added.write_text("x")
    second = packed.pack(environment, tmp_path, os.environ)
    added.unlink()
    assert second.key != first.key
    Path(first.path).unlink()
    assert not packed.touch(first, tmp_path)
    assert packed.pack(environment, tmp_path, os.environ).key == first.key


@pytest.mark.usefixtures("small")
def test_unused_packed_environments_are_removed(venv: Path, tmp_path: Path) -> None:
    environment = EnvironmentConfig(kind="venv", path=str(venv))
    found = packed.pack(environment, tmp_path, os.environ)
    store = packed.store_of(tmp_path)
    old = time.time() - packed.MAX_AGE_S - 60
    for name in ("venv-old.json", "venv-old.tar.zst", ".venv-unfinished.tar.zst.1", "venv-used.tar.zst"):
        (store / name).write_text("{}")
        os.utime(store / name, (old, old))
    (store / "venv-used.json").write_text(json.dumps({}))
    (store / "hpcdist-old").mkdir()
    os.utime(store / "hpcdist-old", (old, old))
    os.utime(store / f"{found.key}.json", (old, old))
    packed.pack(environment, tmp_path, os.environ)
    assert {path.name for path in store.iterdir()} == {
        "lock",
        "venv-used.json",
        "venv-used.tar.zst",
        f"{found.key}.json",
        f"{found.key}.tar.zst",
    }


def test_own_sources_are_copied_once_with_entry_points(tmp_path: Path) -> None:
    folder = packed.copy_sources(tmp_path)
    code = (
        "import hpcdist, importlib.metadata as m;"
        "print(hpcdist.__file__);"
        "print([e.dist._path.parent for e in m.entry_points(group='mlflow.tracking_store') if e.name == 'hpcdist'][0])"
    )
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{folder}/hpcdist/__init__.py", str(folder)]
    assert packed.copy_sources(tmp_path) == folder
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


# --- listings


def test_interrupted_build_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uv.lock").write_text("version = 1\n")
    (tmp_path / "pyproject.toml").write_text("")

    def interrupted(source: Path, uv_args: object, target: Path, env: object) -> None:
        target.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(packed, "build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        packed.pack(EnvironmentConfig(kind="uv", path=str(tmp_path)), tmp_path / "runs", os.environ)
    assert [path for path in packed.store_of(tmp_path / "runs").iterdir() if path.is_dir()] == []
