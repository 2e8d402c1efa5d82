"""Sections of doctor's report about this machine."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hpcdist.diagnostics.doctor import container_runtimes, host_name, rank_startup, runs_folder, software
from hpcdist.diagnostics.doctor.container_checks import container_checks
from hpcdist.diagnostics.doctor.environment_report import program_checks
from hpcdist.diagnostics.doctor.gpu_checks import gpu_checks
from hpcdist.diagnostics.doctor.job_endings import job_end_checks
from hpcdist.diagnostics.doctor.mlflow_store import MlflowStore, store_checks
from hpcdist.diagnostics.doctor.resource_limits import ResourceLimits, resource_checks
from hpcdist.diagnostics.doctor.section import Section
from hpcdist.diagnostics.doctor.slurm_checks import SlurmFacts, client_checks, partition_checks, read_slurm
from hpcdist.machine import facts, gpus, storage
from hpcdist.machine.check import Check, note, ok, warning
from hpcdist.machine.own_image import container_runtime, image_facts
from hpcdist.machine.time_limit import start
from hpcdist.rank.network import private_network
from hpcdist.run.lease import user_name
from hpcdist.slurm.nodelist import expand

#: Limit for the controller, partitions and accounting together.
SLURM_S = 45.0
#: The first access to a network file system may take seconds.
FOLDER_S = 60.0
#: Shell functions of environment modules may read a slow file system.
ENVIRONMENTS_S = 30.0
#: A few requests to a server; a failing name lookup takes most of the time.
STORE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """The subject of the report."""

    env: Mapping[str, str]
    folder: Path  #: the folder of runs, or of one run
    store: MlflowStore | None  #: the MLflow store of a run started on this machine; None if it cannot be determined
    store_problem: str = ""  #: why the store cannot be determined


def machine_sections(request: Request) -> list[Section]:
    """Return the sections about this machine."""
    env, user = request.env, user_name()
    on_cluster = shutil.which("sbatch") is not None
    has_gpus = gpus.gpu_device_files() > 0
    inside = bool(container_runtime())
    slurm = start(read_slurm).result  # one query for all sections
    sections = [
        Section(title="Software", run=lambda: _software(on_cluster=on_cluster)),
        Section(title="Training test", run=lambda: _trials(env), timeout_s=rank_startup.TRIAL_S + 10),
        Section(title="GPUs", run=lambda: _gpus(env), timeout_s=3 * gpus.DRIVER_S),
        Section(
            title="Processors and memory",
            run=lambda: resource_checks(ResourceLimits.inspect()),
        ),
        Section(
            title="Folder of runs",
            run=lambda: runs_folder.folder_checks(request.folder, on_cluster=slurm().reached, in_container=inside),
            timeout_s=FOLDER_S,
            timeout_fix=f"its file system hangs: see `df {request.folder}`, or set another --runs-dir",
        ),
        Section(
            title="MLflow",
            run=lambda: _store(request),
            timeout_s=STORE_S,
            timeout_fix="its host name may not resolve, or its database hangs; metrics wait in the run folder",
        ),
        Section(
            title="Host name",
            run=lambda: _names(slurm()),
            timeout_s=host_name.GIVE_UP_S + SLURM_S,
        ),
        Section(title="Slurm", run=lambda: client_checks(slurm(), user, in_container=inside), timeout_s=SLURM_S),
        Section(title="Partitions", run=lambda: partition_checks(slurm()), timeout_s=SLURM_S),
        Section(title="End of jobs", run=lambda: job_end_checks(slurm()), timeout_s=SLURM_S),
        Section(
            title="Containers",
            run=lambda: container_runtimes.runtime_checks(
                container_runtimes.Host.inspect(user, has_gpus, slurm().proctrack), expected=not inside
            ),
            timeout_s=3 * container_runtimes.TIMEOUT_S + SLURM_S,
        ),
    ]
    if on_cluster:
        sections.append(Section(title="Environments", run=lambda: program_checks(env), timeout_s=ENVIRONMENTS_S))
    if inside:
        sections.insert(0, Section(title="Container", run=lambda: container_checks(image_facts(env), env)))
    return sections


def _software(*, on_cluster: bool) -> list[Check]:
    found = facts.versions()
    return software.software_checks(
        torch_required=not on_cluster, cuda=found.get("cuda", ""), driver=found.get("driver", "")
    )


def _gpus(env: Mapping[str, str]) -> list[Check]:
    found = gpus.gpus()
    visible = gpus.visible_gpus(len(found), env)
    return gpu_checks(found, visible, gpus.gpu_device_files(), gpus.driver_version())


def _trials(env: Mapping[str, str]) -> list[Check]:
    """Start two ranks on CPUs as `hpcdist run` does, and one rank for each GPU."""
    if not software.version_of("torch"):
        return []
    with ThreadPoolExecutor() as pool:
        on_cpus = pool.submit(rank_startup.try_ranks, "cpu", "gloo", 2)
        count = gpus.visible_gpus(len(gpus.gpus()) or gpus.gpu_device_files(), env)
        gpu_ranks = rank_startup.try_ranks("cuda", "nccl", count) if count else []
        cpu_ranks = on_cpus.result()
    checks = [*rank_startup.torch_checks(cpu_ranks), *rank_startup.rank_checks(cpu_ranks, "2 ranks, gloo")]
    if gpu_ranks:
        checks += rank_startup.rank_checks(gpu_ranks, f"{count} rank{'s' * (count > 1)}, nccl")
    return [*checks, _private_network()]


def _private_network() -> Check:
    if reason := private_network.why_refused():
        text = f"the ranks of a local run use this machine's loopback: a network namespace is refused ({reason})"
        return note("network", text)
    return ok("network", "the ranks of hpcdist's trainers run in a network namespace that no other user reaches")


def _store(request: Request) -> list[Check]:
    if request.store is None:
        return [warning("store", request.store_problem)]
    database = request.store.database
    kind = storage.file_system(storage.existing(database)) if database is not None else ""
    return store_checks(request.store, request.env, "" if kind in storage.LOCAL else kind)


def _names(found: SlurmFacts) -> list[Check]:
    host = socket.gethostname()
    lookups = facts.Lookups([host], [host])
    return host_name.host_name_checks(host, lookups.result(host_name.GIVE_UP_S)[host], is_node=_is_node(found))


def _is_node(found: SlurmFacts) -> bool:
    """Return whether this machine is a node of the cluster."""
    host = socket.gethostname().partition(".")[0]
    groups = (group for partition in found.partitions or [] for group in partition.nodes)
    return any(host in expand(group.names) for group in groups)
