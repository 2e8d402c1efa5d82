"""A copy of hpcdist for environments of ranks, so that ranks and supervisor have the same version."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import hpcdist
from hpcdist.machine.facts import source_digest


def copy_sources(store: Path) -> Path:
    """Copy the running hpcdist into a folder of `store`, unless it is there; return that folder, for PYTHONPATH.

    The copy includes the entry points, by which MLflow in a rank finds hpcdist's tracking store.
    """
    package = Path(hpcdist.__file__).parent
    target = store / f"hpcdist-{source_digest(str(package))}"
    if target.is_dir():
        os.utime(target)
        return target
    partial = Path(tempfile.mkdtemp(dir=store, prefix=f".{target.name}."))
    try:
        shutil.copytree(package, partial / "hpcdist", ignore=shutil.ignore_patterns("__pycache__"))
        _copy_metadata(partial)
        os.rename(partial, target)
    except OSError:
        if not target.is_dir():  # otherwise another job has created it meanwhile
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _copy_metadata(folder: Path) -> None:
    from importlib import metadata  # slow to import

    try:
        own = metadata.distribution("hpcdist")
    except metadata.PackageNotFoundError:
        return
    target = folder / f"hpcdist-{hpcdist.__version__}.dist-info"
    target.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        if (text := own.read_text(name)) is not None:
            (target / name).write_text(text)
