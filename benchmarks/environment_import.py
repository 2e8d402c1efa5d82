"""Start of Python with torch from a shared file system, and from a copy on the node's disk.

    python benchmarks/environment_import.py [--latency-ms 0 1] [--rounds 3]

The shared file system is simulated: a FUSE file system shows the environment and delays each request of the kernel (to
look up a name, open a file, or read up to 1 MiB) by the latency. It keeps names and attributes for 60 s and nothing at
its start, like the client of a network file system at the first use on a node. The copy is made by the code that runs
on nodes, from an archive on the same file system. Needs the package mfusepy, /dev/fuse and 10 GB in `--folder`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from harness import argument_parser, call, clean_env

from hpcdist.config.schema.environment import EnvironmentConfig
from hpcdist.environments.node_copy import NodeRequest, prepare
from hpcdist.environments.own_sources import copy_sources
from hpcdist.environments.packed import pack, store_of

#: What a rank imports before the user's code.
PACKAGES = ("torch", "numpy", "psutil")
IMPORT = f"import {', '.join(PACKAGES)}"
CACHE_S = 60
MOUNT_WAIT_S = 30.0


def serve(source: str, mountpoint: str, latency_ms: float) -> None:
    """Show `source`, read-only, at `mountpoint` until it is unmounted."""
    import mfusepy

    class Delayed(mfusepy.Operations):  # type: ignore[misc]
        """Passes requests on after the latency."""

        def getattr(self, path: str, fh: int | None = None) -> dict[str, float]:
            time.sleep(latency_ms / 1e3)
            try:
                status = os.lstat(source + path)
            except OSError as error:
                raise mfusepy.FuseOSError(error.errno) from error
            names = ("st_mode", "st_size", "st_mtime", "st_nlink", "st_uid", "st_gid")
            return {name: getattr(status, name) for name in names}

        def readlink(self, path: str) -> str:
            time.sleep(latency_ms / 1e3)
            return os.readlink(source + path)

        def readdir(self, path: str, fh: int) -> list[str]:
            time.sleep(latency_ms / 1e3)
            return [".", "..", *os.listdir(source + path)]

        def open(self, path: str, flags: int) -> int:
            time.sleep(latency_ms / 1e3)
            return os.open(source + path, os.O_RDONLY)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            time.sleep(latency_ms / 1e3)
            return os.pread(fh, size, offset)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

    times = {"entry_timeout": CACHE_S, "attr_timeout": CACHE_S, "negative_timeout": CACHE_S}
    mfusepy.FUSE(Delayed(), mountpoint, foreground=True, ro=True, max_read=1 << 20, **times)


@contextmanager
def mounted(source: Path, place: Path, latency_ms: float) -> Iterator[Path]:
    """Show a folder through a new mount, without anything in its caches."""
    place.mkdir(exist_ok=True)
    words = [sys.executable, __file__, "--serve", str(source), str(place), str(latency_ms)]
    process = subprocess.Popen(words)
    try:
        until = time.monotonic() + MOUNT_WAIT_S
        while not os.path.ismount(place):
            if process.poll() is not None or time.monotonic() > until:
                sys.exit("the FUSE file system does not start")
            time.sleep(0.05)
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=False)
        process.wait(MOUNT_WAIT_S)


def make_environment(folder: Path) -> Path:
    """Create a virtual environment with torch, as hard links to the files of this one."""
    target = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", target], check=True)
    (site,) = target.glob("lib/python*/site-packages")
    for name in sorted(closure(PACKAGES)):
        for file in metadata.distribution(name).files or ():
            source = Path(str(file.locate()))
            if ".." not in file.parts and source.is_file():
                copy = site / file
                copy.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(source, copy)
    return target


def link_or_copy(source: Path, copy: Path) -> None:
    try:
        os.link(source, copy)
    except OSError:
        shutil.copy2(source, copy)


def closure(names: tuple[str, ...]) -> set[str]:
    """Return installed packages and all that they require."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.split(r"[^A-Za-z0-9._-]", waiting.pop(), maxsplit=1)[0].lower().replace("_", "-")
        if name in found:
            continue
        try:
            requires = metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        waiting += [line for line in requires if "extra ==" not in line]
        extras = [line for line in requires if "extra ==" in line and name.startswith("cuda")]
        waiting += extras
    return found


def start_s(environment: Path) -> float:
    """Return the seconds for starting Python and importing the packages."""
    began = time.perf_counter()
    call([str(environment / "bin" / "python3"), "-P", "-c", IMPORT], Path("/"), clean_env("PYTHON"))
    return time.perf_counter() - began


def measure(folder: Path, latencies: list[float], rounds: int) -> dict[str, dict[str, float]]:
    """Return for each latency the median seconds: from the shared file system, from the copy, and to copy."""
    environment = make_environment(folder)
    start_s(environment)  # compiles what is not compiled
    packed = pack(EnvironmentConfig(kind="venv", path=str(environment)), folder / "runs", clean_env())
    store = store_of(folder / "runs")
    sources = copy_sources(store)
    local = folder / "disk"
    local.mkdir()
    request = NodeRequest(
        python="",
        sources=str(sources),
        folder=str(local / "hpcdist"),
        key=packed.key,
        sha256=packed.sha256,
        prefix=packed.prefix,
        max_age_s=86400.0,
    )
    rows = {}
    for latency in latencies:
        shutil.rmtree(local / "hpcdist", ignore_errors=True)
        with mounted(store, folder / "shared-store", latency) as shared:
            began = time.perf_counter()
            prepare(NodeRequest(**{**vars(request), "archive": str(shared / Path(packed.path).name)}))
            copy_s = time.perf_counter() - began
        copied = local / "hpcdist" / packed.key
        start_s(copied)
        seconds: dict[str, list[float]] = {"shared_s": [], "copy_s": [copy_s], "local_s": []}
        for _ in range(rounds):
            with mounted(environment, folder / "shared", latency) as shared:
                seconds["shared_s"].append(start_s(shared))
            seconds["local_s"].append(start_s(copied))
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        rows[f"{latency:g} ms"] = {**medians, "shared_over_local": medians["shared_s"] / medians["local_s"]}
    size = {"archive_mb": packed.size_bytes / 1e6}
    return {**rows, "size": size}


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], float(sys.argv[4]))
        return
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--latency-ms", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--folder", type=Path, help="an existing folder for temporary files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder and arguments.folder.resolve()) as name:
        rows = measure(Path(name), arguments.latency_ms, arguments.rounds)
    size = rows.pop("size")
    print(f"archive of {size['archive_mb']:.0f} MB; medians of {arguments.rounds} rounds\n")
    for latency, row in rows.items():
        print(
            f"latency {latency}: {IMPORT} takes {row['shared_s']:.2f} s from the shared file system,"
            f" {row['local_s']:.2f} s from the copy ({row['shared_over_local']:.1f} times as long);"
            f" making the copy took {row['copy_s']:.1f} s"
        )
    if arguments.json:
        print(json.dumps({"benchmark": "environment_import", **size, "latency": rows}))


if __name__ == "__main__":
    main()
