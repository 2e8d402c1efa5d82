"""Start of Python with torch from a shared file system, and from the copy of `cluster.environment` on the node's disk.

    python benchmarks/environment_import.py [--latency-ms 0 0.3 1] [--rounds 3] [--folder DIR]

A FUSE file system stands for the shared one. It shows a folder of this machine and delays each request by the latency:
looking up a name, opening a file, reading up to 128 KiB of it, listing a folder. The kernel keeps names, attributes and
content, as it does for NFS, and each round starts with a new mount, as the first run on a node does; `again` is a
second start on the same mount. The model has no limit of bandwidth, and its server answers requests in parallel from
memory. Without latency a request takes about 0.1 ms, the cost of FUSE and of a server in Python.

The copy is made by the code that runs on nodes, from the packed archive on the same kind of mount. Afterwards its files
are in the page cache, as on a node. Root, /dev/fuse, the package mfusepy, and 12 GB in `--folder` are required.
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
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import argument_parser, call, clean_env

from hpcdist.config.launch_schema import EnvironmentConfig
from hpcdist.environments.node_copy import NodeRequest, prepare
from hpcdist.environments.packed import copy_sources, pack, store_of

#: What a rank imports before the user's code.
PACKAGES = ("torch", "numpy", "psutil")
#: The kernel keeps names and attributes for this time, as the client of a network file system does.
CACHE_S = 60
MOUNT_WAIT_S = 60.0
#: Set in the process that has a mount namespace of its own.
OWN_MOUNTS = "ENVIRONMENT_IMPORT_MOUNTS"


def serve(source: str, mountpoint: str, latency_ms: float) -> None:
    """Show a folder, read-only, at `mountpoint` until it is unmounted."""
    import mfusepy

    class Delayed(mfusepy.Operations):  # type: ignore[misc]
        """Answers requests after the latency; libfuse calls each operation in a thread."""

        use_ns = True

        def __init__(self) -> None:
            self.num_requests = 0

        def _wait(self) -> None:
            self.num_requests += 1
            if latency_ms:
                time.sleep(latency_ms / 1e3)

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            if path == "/.requests":  # for the benchmark
                return {"st_mode": 0o100444, "st_size": self.num_requests, "st_nlink": 1}
            self._wait()
            try:
                status = os.lstat(source + path)
            except OSError as error:
                raise mfusepy.FuseOSError(error.errno) from error
            names = ("st_mode", "st_size", "st_nlink", "st_uid", "st_gid")
            return {"st_mtime": status.st_mtime_ns, **{name: getattr(status, name) for name in names}}

        def readlink(self, path: str) -> str:
            self._wait()
            return os.readlink(source + path)

        def readdir(self, path: str, fh: int) -> list[str]:
            self._wait()
            return [".", "..", *os.listdir(source + path)]

        def open(self, path: str, flags: int) -> int:
            self._wait()
            return os.open(source + path, os.O_RDONLY)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            self._wait()
            return os.pread(fh, size, offset)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

    times = {"entry_timeout": CACHE_S, "attr_timeout": CACHE_S, "negative_timeout": CACHE_S}
    mfusepy.FUSE(Delayed(), mountpoint, foreground=True, ro=True, kernel_cache=True, **times)


@contextmanager
def mounted(source: Path, place: Path, latency_ms: float) -> Iterator[Path]:
    """Show a folder through a new mount, without anything in its caches."""
    place.mkdir(exist_ok=True)
    words = [sys.executable, str(Path(__file__).resolve()), "--serve", str(source), str(place), str(latency_ms)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + MOUNT_WAIT_S
        while not os.path.ismount(place):
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                sys.exit(f"the FUSE file system does not start: {process.communicate()[1]}")
            time.sleep(0.05)
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=False)
        process.terminate()
        process.communicate(timeout=MOUNT_WAIT_S)


def num_requests(mount: Path) -> int:
    """Return the number of requests that a mount has answered."""
    return (mount / ".requests").stat().st_size


def make_environment(folder: Path, packages: tuple[str, ...]) -> Path:
    """Create a virtual environment with some packages, as hard links to the files of this one."""
    target = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", target], check=True)
    (site,) = target.glob("lib/python*/site-packages")
    for name in sorted(closure(packages)):
        for file in metadata.distribution(name).files or ():
            source = Path(str(file.locate()))
            if ".." not in file.parts and source.is_file():
                copy = site / file
                copy.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(source, copy)
    return target


def link_or_copy(source: Path, copy: Path) -> None:
    """Create a hard link, or a copy on another file system."""
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
        try:
            requires = metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            # torch requires CUDA's libraries as extras of one package.
            waiting += [line for line in requires if "extra ==" not in line or name.startswith("cuda")]
    return found


def start_s(environment: Path, code: str) -> float:
    """Return the seconds for starting Python and importing the packages."""
    began = time.perf_counter()
    call([str(environment / "bin" / "python3"), "-P", "-c", code], Path("/"), clean_env("PYTHON"))
    return time.perf_counter() - began


def measure(folder: Path, packages: tuple[str, ...], latencies: list[float], rounds: int) -> dict[str, Any]:
    """Return the size of the archive, and for each latency the median seconds of the starts and of the copy."""
    code = f"import {', '.join(packages)}"
    environment = make_environment(folder, packages)
    start_s(environment, code)  # compiles what is not compiled
    began = time.perf_counter()
    packed = pack(EnvironmentConfig(kind="venv", path=str(environment)), folder / "runs", clean_env())
    pack_s = time.perf_counter() - began
    store = store_of(folder / "runs")
    local = folder / "disk" / "hpcdist"
    request = NodeRequest(
        python="",
        sources=str(copy_sources(store)),
        folder=str(local),
        key=packed.key,
        sha256=packed.sha256,
        prefix=packed.prefix,
    )
    rows = {}
    for latency in latencies:
        shutil.rmtree(local, ignore_errors=True)
        with mounted(store, folder / "shared-store", latency) as shared:
            began = time.perf_counter()
            prepare(replace(request, archive=str(shared / Path(packed.path).name)))
            copy_s = time.perf_counter() - began
        start_s(local / packed.key, code)
        seconds: dict[str, list[float]] = {"shared": [], "again": [], "local": [], "requests": []}
        for _ in range(rounds):
            with mounted(environment, folder / "shared", latency) as shared:
                seconds["shared"].append(start_s(shared, code))
                seconds["requests"].append(num_requests(shared))
                seconds["again"].append(start_s(shared, code))
            seconds["local"].append(start_s(local / packed.key, code))
        row = {name: statistics.median(values) for name, values in seconds.items()}
        rows[f"{latency:g} ms"] = {**row, "copy": copy_s, "shared_over_local": row["shared"] / row["local"]}
    return {"archive_mb": Path(packed.path).stat().st_size / 1e6, "pack_s": pack_s, "latency": rows}


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], float(sys.argv[4]))
        return
    if OWN_MOUNTS not in os.environ:
        # Otherwise namespaces that other processes create meanwhile would keep the mounts.
        command = ["unshare", "--mount", "--propagation=private", sys.executable, *sys.argv]
        sys.exit(subprocess.run(command, env={**os.environ, OWN_MOUNTS: "1"}, check=False).returncode)
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--latency-ms", type=float, nargs="+", default=[0.0, 0.3, 1.0])
    parser.add_argument("--packages", nargs="+", default=PACKAGES, help="imported packages")
    parser.add_argument("--folder", type=Path, help="an existing folder for temporary files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder and arguments.folder.resolve()) as name:
        found = measure(Path(name), tuple(arguments.packages), arguments.latency_ms, arguments.rounds)
    print(
        f"import {', '.join(arguments.packages)}, medians of {arguments.rounds} rounds in s; archive of"
        f" {found['archive_mb']:.0f} MB, packed in {found['pack_s']:.0f} s\n"
    )
    print("latency    shared   again   local   shared/local   requests   copy to the node, once")
    for latency, row in found["latency"].items():
        print(
            f"{latency:<8}{row['shared']:9.1f}{row['again']:8.1f}{row['local']:8.1f}{row['shared_over_local']:15.2f}"
            f"{row['requests']:11.0f}{row['copy']:25.1f}"
        )
    if arguments.json:
        print(json.dumps({"benchmark": "environment_import", **found}))


if __name__ == "__main__":
    main()
