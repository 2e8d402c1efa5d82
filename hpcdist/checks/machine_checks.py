"""Checks of this machine: software, GPUs, host name, and a test with ranks."""

import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import hpcdist
from hpcdist.checks import node_facts
from hpcdist.config.launch_schema import GPU_BACKENDS
from hpcdist.errors import plural
from hpcdist.host.check_result import Check, failure, note, ok, warning
from hpcdist.host.gpu_info import Gpu
from hpcdist.host.image_identity import install_command
from hpcdist.host.time_limits import last_line, run_within
from hpcdist.host.versions import version_of
from hpcdist.review.explain import Finding, explain_attempt
from hpcdist.review.facts import readable
from hpcdist.run.folder import RunDir

TOGETHER = "install both together from one index: `pip install --force-reinstall torch torchvision`"


def software_checks(versions: Mapping[str, str], *, torch_required: bool) -> list[Check]:
    """Check the installed software.

    Args:
        versions: of packages and the driver by name, as `versions.versions` returns them.
        torch_required: whether ranks run on this machine with this Python.
    """
    torch = versions.get("torch", "")
    cuda = versions.get("cuda", "")
    driver = versions.get("driver", "")
    checks = [
        ok("Python", f"{versions['python']}, {sys.prefix}"),
        ok("hpcdist", f"{hpcdist.__version__}, {Path(hpcdist.__file__).parent}"),
    ]
    if not torch and torch_required:
        text = "not installed: a run on this machine would fail"
        return [*checks, failure("torch", text, install_command("train"))]
    if not torch:
        text = "not installed: ranks need container.image or cluster.environment, as they use this Python otherwise"
        return [*checks, note("torch", text, install_command("train"))]
    vision = version_of("torchvision")
    pinned = _torch_of_torchvision() if vision else ""
    torch_release = torch.partition("+")[0]  # `2.9.1` of `2.9.1+cu128`
    if pinned and pinned != torch_release:
        text = f"{torch} beside a torchvision {vision} built for {pinned}, which cannot be imported"
        checks.append(failure("torch", text, TOGETHER))
    elif driver and not cuda:
        text = f"{torch} is built without CUDA, and this machine has GPUs: training uses the CPUs"
        checks.append(warning("torch", text, f"install a build with CUDA; {TOGETHER}"))
    else:
        build = f"for CUDA {cuda}" if cuda else "without CUDA"
        checks.append(ok("torch", f"{torch}, built {build}"))
    if not vision:
        checks.append(warning("torchvision", "not installed: image trainers need it", TOGETHER))
    problems = list(node_facts.driver_checks(versions))
    if problems:
        checks += problems
    elif driver and cuda:
        checks.append(ok("driver", f"{driver}, supports CUDA {cuda}"))
    elif driver:
        checks.append(ok("driver", driver))
    return checks


def _torch_of_torchvision() -> str:
    """Return the version of torch that the installed torchvision requires, which it pins exactly; empty if unknown."""
    for requirement in metadata.requires("torchvision") or ():
        match = re.match(r"torch\s*\(?==\s*([\w.]+)", requirement)
        if match:
            return match[1]
    return ""


def all_gpu_checks(
    gpus: Sequence[Gpu], num_visible: int, num_devices: int, driver: str, *, has_amd_driver: bool = False
) -> list[Check]:
    """Check all GPUs of this machine.

    Args:
        num_visible: number of GPUs that CUDA_VISIBLE_DEVICES selects.
        num_devices: number of GPUs with a device file.
        driver: version of the driver; empty without one.
        has_amd_driver: whether there may be GPUs of AMD, which are not known.
    """
    if not gpus:
        if num_devices or driver:
            text = f"NVML reports no GPU, although driver {driver} is loaded and {num_devices} device files exist"
            fix = (
                "see the error of `nvidia-smi`; in a container pass GPUs in"
                " (docker: --gpus all, podman: --device nvidia.com/gpu=all, apptainer: --nv)"
            )
            return [warning("GPUs", text, fix)]
        if has_amd_driver:
            text = "those of AMD are not checked, and not counted: hpcdist asks NVIDIA's driver"
            return [note("GPUs", text, "list them in CUDA_VISIBLE_DEVICES for runs on this machine, see `rocm-smi`")]
        return [note("GPUs", "none: training uses the CPUs")]
    checks = []
    for gpu in gpus:
        text = gpu.name
        if gpu.total_mb:
            text += f", {gpu.total_mb / 1024:.0f} GiB"
        problems = [replace(check, text=f"{text}: {check.text}") for check in node_facts.gpu_checks(vars(gpu))]
        if problems:
            checks += problems
        else:
            checks.append(ok(f"GPU {gpu.index}", text))
    if num_visible < len(gpus):
        text = f"{num_visible} of {len(gpus)} according to CUDA_VISIBLE_DEVICES"
        checks.append(note("visible", text, "unset it to use all of them"))
    return checks


#: Time limit of a lookup of names. glibc waits 5 s for each server and asks it twice.
GIVE_UP_S = 15.0


def host_name_checks(host: str, lookup: Mapping[str, Any], *, is_node: bool) -> list[Check]:
    """Check the lookup of this machine's name.

    Args:
        lookup: result of `look_up`.
        is_node: whether the machine is a node of a cluster: other nodes then look up its name.
    """
    problems = [*node_facts.lookup_checks(host, lookup), *node_facts.loopback_checks(host, lookup)]
    if problems and is_node:
        return problems
    if problems:
        unaffected = "; runs on this machine alone are not affected"
        return [replace(problem, level="note", text=problem.text + unaffected) for problem in problems]
    found_name = lookup.get("reverse")  # of the address
    if not found_name:
        found_name = f"no name ({lookup['reverse_error']}): fast, so harmless"
    took = f"{1000 * lookup['forward_s']:.0f} ms, reverse {1000 * lookup['reverse_s']:.0f} ms"
    return [ok("names", f"{host} → {lookup['address']} → {found_name} ({took})")]


#: On a slow network file system, the import of torch takes most of this time.
TRIAL_S = 90.0
#: Config and overrides of the trial.
_TRIAL = (
    "bench_comm",
    "comm.operations=[all_reduce]",
    "comm.max_bytes=64K",
    "name=trial",
    "launch.hang_timeout_s=60",
    "launch.max_restarts=0",
    "launch.init_timeout_s=60",
    "tracking.drain_timeout_s=0",
    "tracking.system_interval_s=0",
)


def trial_checks(device: str, num_ranks: int, env: Mapping[str, str]) -> list[Check]:
    """Start ranks with `hpcdist run`, in child processes, so that a hang cannot block doctor."""
    with tempfile.TemporaryDirectory(prefix="hpcdist-trial-", ignore_cleanup_errors=True) as folder:
        words = [*_TRIAL, f"launch.device={device}", f"launch.num_ranks={num_ranks}", f"runs_dir={folder}/runs"]
        command = [sys.executable, "-P", "-m", "hpcdist", "run", *words]
        trial_env = {**env, "HPCDIST_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
        began = time.monotonic()
        done = run_within(command, TRIAL_S, env=trial_env)
        run = RunDir(Path(folder, "runs", "comm", "trial"))
        state = readable(run.read_state)
        backend = GPU_BACKENDS.get(device, "gloo")
        name = f"{plural(num_ranks, 'rank')}, {backend}"
        # The code of `run_within` after the time limit: a warning, since a run without this limit would only be slow.
        if done.returncode == -1:
            return [warning(name, f"the ranks did not end within {TRIAL_S:g} s", "install torch on a local disk")]
        if state is None:
            return [failure(name, f"they cannot be started: {last_line(done.stderr or done.stdout)}")]
        if state.status == "finished":
            return [ok(name, f"{state.reason}, {time.monotonic() - began:.0f} s with all imports")]
        finding = explain_attempt(run, run.attempt(state.attempt), state.reason) or Finding(cause=state.reason)
        evidence = ""
        if finding.evidence:
            evidence = f": {finding.evidence}"
        return [failure(name, f"{finding.cause}{evidence}", finding.fix)]
