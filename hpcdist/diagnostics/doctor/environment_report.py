"""Checks of Python environments of ranks without containers (`cluster.environment`): programs, and those of a run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from hpcdist.environments.loaded_modules import modules_version
from hpcdist.environments.uv_project import uv_program
from hpcdist.files.atomic import read_json
from hpcdist.machine.check import Check, note, ok, warning
from hpcdist.machine.timed_command import last_line, run_within
from hpcdist.run.folder import RunDir

TIMEOUT_S = 10.0
#: Versions in the record, with their names.
_VERSIONS = {"python": "Python", "torch": "torch", "cuda": "CUDA"}


def program_checks(env: Mapping[str, str]) -> list[Check]:
    """Return which kinds of environments this machine can prepare; nodes need zstd, tar and unsquashfs, too."""
    path = env.get("PATH")
    checks = [_uv(env)]
    if shutil.which("zstd", path=path):
        checks.append(ok("zstd", "installed: copies of environments are packed (kind=venv, kind=uv)"))
    else:
        text = "not installed: environments are not copied to local disks (kind=venv, kind=uv)"
        checks.append(note("zstd", text, "install zstd here and on the nodes, or set cluster.environment.stage=false"))
    if shutil.which("unsquashfs", path=path):
        checks.append(ok("unsquashfs", "installed: images are unpacked (kind=squashfs)"))
    else:
        text = "not installed here; nodes need it for kind=squashfs"
        checks.append(note("unsquashfs", text, "install squashfs-tools on the nodes"))
    found = modules_version(env)
    if found is None:
        return [*checks, note("modules", "the command `module` is not available: kind=module cannot be used")]
    return [*checks, ok("modules", f"{found} (kind=module, cluster.environment.modules)")]


def _uv(env: Mapping[str, str]) -> Check:
    program = uv_program(env)
    if program is None:
        return note("uv", "not installed: locked projects cannot be built (kind=uv)", "`pip install uv`")
    done = run_within([program, "--version"], TIMEOUT_S, env=env)
    if done.returncode != 0:
        return note(
            "uv", f"installed, but fails: {last_line(done.stderr) or 'no error message'}", f"`{program} --version`"
        )
    return ok("uv", f"{done.stdout.removeprefix('uv ').split()[0]}: locked projects are built (kind=uv)")


def run_checks(run: RunDir) -> list[Check]:
    """Return the recorded environment of a run's ranks, and whether the next start can use it."""
    record = read_json(run.rank_environment)
    if record is None:
        return []
    path = Path(str(record.get("path", "")))
    versions = [f"{title} {record[name]}" for name, title in _VERSIONS.items() if record.get(name)]
    modules = record.get("modules")
    parts = [f"kind={record.get('kind')}", *([str(path)] if record.get("path") else [])]
    parts += [f"modules {' '.join(modules)}"] if modules else []
    parts += versions or ["no node has prepared it yet"]
    checks = [ok("environment", ", ".join(parts))]
    if record.get("path") and not path.exists():
        is_copy = path.suffix == ".zst" or record.get("kind") == "uv"
        effect = "packs the present content of cluster.environment.path" if is_copy else "fails"
        text = f"{path} does not exist any more: the next start of the job {effect}"
        checks.append(warning("files", text, "restore it if the run must keep its versions"))
    return checks
