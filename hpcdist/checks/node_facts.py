"""Facts of one machine on which ranks depend, and the meaning of each of them.

`hpcdist doctor` asks for them on this machine, the preflight on each node of a job. Reading them needs no torch, as it
must also work on a machine where torch is broken; psutil and pynvml are imported when their facts are read.
"""

import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hpcdist.host import gpu_info, machine, storage, versions
from hpcdist.host.check_result import Check, Level, failure, warning
from hpcdist.host.gpu_info import DRIVER_S, driver_problem, gpu_device_files, visible_gpus
from hpcdist.host.time_limits import done_within, start

#: Limit of a file system's answer.
FOLDER_S = 5.0
#: Limit of a name lookup; torch makes several before ranks have met.
LOOKUP_S = 5.0
#: A network file system shows another machine's file only after some time.
WITNESS_S = 3.0
#: Bytes of the write test, and its time limit.
WRITE_BYTES, WRITE_S = 4 * 2**20, 1.5

MB = 1e6
GIB = 2**30
#: Assumed need of a checkpoint before the first one is saved.
LITTLE_DISK_BYTES, NO_DISK_BYTES = 1e9, 100 * MB
FEW_FILES, NO_FILES = 1000, 50
#: docker's default of 64 MiB is the usual cause of `bus error` in data workers and NCCL.
LITTLE_SHM_BYTES = 2**28
#: The driver itself uses a few hundred MB of each GPU, and a display no more than that.
IDLE_GPU_MB = 1024
#: Each rank pays the time of a lookup at its start.
SLOW_LOOKUP_S = 1.0
_REPEATED = "torch repeats the lookup when ranks start"
_FASTER_LOOKUP = "add the nodes to /etc/hosts, or set cluster.env.RES_OPTIONS='timeout:1 attempts:1'"
_MIB = 2**20


def read_facts(
    names: tuple[str, ...], checkpoints: Path, witness: Path, token: str, env: Mapping[str, str]
) -> dict[str, Any]:
    """Return the facts of this machine. Calls that may hang run in threads.

    Args:
        names: names to look up.
        checkpoints: the folder of checkpoints, which may not exist yet.
        witness: a file with the `token`, which shows that the machine sees the run folder.
    """
    began = time.monotonic()
    lookups = {name: start(partial(machine.look_up, name)) for name in names}
    hardware = start(partial(read_hardware, env))
    is_seen = start(lambda: storage.sees(witness, token, WITNESS_S))
    found: dict[str, Any] = {"host": socket.gethostname()}
    found["checkpoints"] = read_checkpoint_folder(checkpoints)
    found["shm"] = storage.describe(Path("/dev/shm"), FOLDER_S)  # noqa: S108
    found["witness"] = done_within(FOLDER_S, is_seen, False)
    unknown: dict[str, Any] = {}
    known = done_within(DRIVER_S, hardware, unknown)
    found |= known
    found["lookups"] = {name: done_within(LOOKUP_S, look, {"late": LOOKUP_S}) for name, look in lookups.items()}
    found["time"] = time.time()
    found["seconds"] = round(time.monotonic() - began, 2)
    return found


def read_hardware(env: Mapping[str, str]) -> dict[str, Any]:
    """Return versions and GPUs; a driver that does not answer makes this hang."""
    gpus = gpu_info.gpus()
    return {
        "versions": versions.versions(),
        "gpus": [asdict(gpu) for gpu in gpus],
        "visible_gpus": visible_gpus(len(gpus), env),
        "gpu_device_files": gpu_device_files(),
        "amd_driver": gpu_info.has_amd_driver(),
    }


def read_checkpoint_folder(folder: Path) -> dict[str, Any]:
    """Return the facts of the checkpoints' file system (storage.describe), with `write_error` if it is unusable."""
    found = storage.describe(folder, FOLDER_S)
    if "error" in found:
        return found
    limit_s = WRITE_S + FOLDER_S
    try:
        start(lambda: storage.write_speed(folder, WRITE_BYTES, WRITE_S)).result(limit_s)
    except TimeoutError:
        found["write_error"] = f"{WRITE_BYTES >> 20} MB were not on disk after {limit_s:g} s"
    except OSError as error:
        found["write_error"] = error.strerror or str(error)
    return found


# The meaning of each fact, with one threshold.


def driver_checks(versions: Mapping[str, str]) -> Iterator[Check]:
    """Check whether the driver supports the CUDA version of torch; nothing is reported if one of them is unknown."""
    needed = driver_problem(versions.get("cuda", ""), versions.get("driver", ""))
    if needed:
        where = "https://pytorch.org/get-started/locally"
        fix = f"update the driver, or use a torch (or an image) for an older CUDA: {where}"
        yield failure("driver", f"torch {versions.get('torch', '')} needs {needed}", fix)


def gpu_checks(gpu: Mapping[str, Any]) -> Iterator[Check]:
    """Report memory errors, throttling and other users of a GPU, given the values of a `Gpu`."""
    name = f"GPU {gpu['index']}"
    used_mb = gpu["used_mb"] or 0
    total_mb = gpu["total_mb"] or 0
    if gpu["uncorrected_errors"]:
        text = f"has {gpu['uncorrected_errors']} uncorrected memory errors since its driver was loaded"
        fix = (
            f"an administrator drains the node and resets it (`nvidia-smi --gpu-reset -i {gpu['index']}`);"
            " if errors return, the card is defective: exclude it by CUDA_VISIBLE_DEVICES"
        )
        yield failure(name, text, fix)
    if gpu["throttled"]:
        text = f"is throttled: {', '.join(gpu['throttled'])}"
        yield warning(name, text, "check cooling and power, or exclude the node")
    if used_mb > IDLE_GPU_MB:
        who = ""
        if gpu["pids"]:
            who = f" by process {', '.join(map(str, gpu['pids']))}"
        text = f"has {used_mb:,} of {total_mb:,} MB in use{who}"
        level: Level = "failure" if used_mb * 2 > total_mb > 0 else "warning"
        fix = "find their owner (`nvidia-smi`; `ps -fp PID`), and end leftover processes"
        yield Check(name=name, level=level, text=text, fix=fix)


def space_checks(disk: Mapping[str, Any], checkpoint_bytes: int | None = None) -> Iterator[Check]:
    """Check the free space and inodes of the file system of checkpoints, given a result of `storage.describe`."""
    where = disk["folder"]
    fix = f"remove old runs or checkpoints (`df -h {where}`, `hpcdist runs`), or set runs_dir to another file system"
    little_bytes, no_bytes = LITTLE_DISK_BYTES, NO_DISK_BYTES
    need = "possibly too little for a checkpoint"
    if checkpoint_bytes:
        little_bytes, no_bytes = 2 * checkpoint_bytes, checkpoint_bytes
        need = f"the last checkpoint had {checkpoint_bytes / MB:,.0f} MB"
    if disk["free"] < little_bytes:
        level: Level = "failure" if disk["free"] < no_bytes else "warning"
        yield Check(name="disk", level=level, text=f"{disk['free'] / MB:,.0f} MB are free in {where}, {need}", fix=fix)
    if disk.get("free_files", FEW_FILES) < FEW_FILES:
        level = "failure" if disk["free_files"] < NO_FILES else "warning"
        text = f"{disk['free_files']:,} more files can be created in {where} (`df -i {where}`)"
        yield Check(name="disk", level=level, text=text, fix=fix)


def shm_checks(free_bytes: int) -> Iterator[Check]:
    """Report too little free memory in /dev/shm."""
    if free_bytes < LITTLE_SHM_BYTES:
        text = f"{free_bytes / _MIB:,.0f} MiB are free in /dev/shm; data workers and NCCL pass tensors through it"
        fix = "start the container with --shm-size=8g or --ipc=host, or remove leftover files there"
        yield warning("shm", text, fix)


def lookup_checks(called: str, look: Mapping[str, Any]) -> Iterator[Check]:
    """Report a name (`its own name`, `the name n1`) that cannot be looked up, or only slowly."""
    if "error" in look:
        fix = "add it to the DNS, or to /etc/hosts on all machines of a run"
        yield failure("names", f"{called} cannot be looked up ({look['error']})", fix)
    elif "late" in look:
        text = f"looking up {called}, or its address, took more than {look['late']:g} s; {_REPEATED}"
        yield warning("names", text, _FASTER_LOOKUP)
    elif look["forward_s"] > SLOW_LOOKUP_S:
        text = f"looking up {called} took {look['forward_s']:.1f} s; {_REPEATED}"
        yield warning("names", text, _FASTER_LOOKUP)
    elif look.get("reverse_s", 0) > SLOW_LOOKUP_S:
        text = f"the reverse lookup of {look['address']} took {look['reverse_s']:.1f} s; {_REPEATED}"
        yield warning("names", text, _FASTER_LOOKUP)


def loopback_checks(called: str, look: Mapping[str, Any]) -> Iterator[Check]:
    """Report a name that `look_up` has resolved to the address of the machine itself."""
    if is_loopback(look):
        text = f"{called} resolves to {look['address']}, which other nodes cannot reach"
        yield failure("names", text, "set its reachable address in /etc/hosts (Debian's installer writes 127.0.1.1)")


def is_loopback(look: Mapping[str, Any]) -> bool:
    """Return whether the address in the result of `look_up` is a loopback address; False without an address."""
    return str(look.get("address", "")).startswith("127.")
