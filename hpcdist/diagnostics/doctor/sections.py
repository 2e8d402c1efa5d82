"""The parts of the page about this machine, each put together from facts and what follows from them."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hpcdist.diagnostics.doctor import (
    container_runtimes,
    gpus,
    host_name,
    job_endings,
    resource_limits,
    runs_folder,
    slurm,
    software,
    torch_trials,
)
from hpcdist.diagnostics.doctor.mlflow_store import Store, store
from hpcdist.diagnostics.doctor.section import Section
from hpcdist.machine import facts, storage
from hpcdist.machine.check import Check
from hpcdist.machine.own_image import image_facts
from hpcdist.run.lease import user_name
from hpcdist.slurm.nodelist import expand

#: The controller, its partitions and accounting, each with the patience of `cluster/`.
SLURM_S = 45.0
#: A network file system that wakes up takes seconds; what is tried there is small.
FOLDER_S = 60.0
#: A few questions to a server; looking its name up takes longest where it goes wrong.
STORE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the page is to be about."""

    env: Mapping[str, str]
    folder: Path  #: of runs, or of one run
    store: Store | None  #: where runs would be shipped to; None where that cannot be said
    store_problem: str = ""  #: why not


def machine_sections(request: Request) -> list[Section]:
    """All that can be said of this machine without a run."""
    env, user = request.env, user_name()
    on_cluster = shutil.which("sbatch") is not None
    has_gpus = facts.gpu_device_files() > 0
    inside = resource_limits.in_container()
    answers = slurm.Once(slurm.ask_slurm)
    sections = [
        Section(title="Software", look=lambda: _software(on_cluster=on_cluster)),
        Section(title="Training, tried", look=lambda: _trials(env), within_s=torch_trials.TRIAL_S + 10),
        Section(title="GPUs", look=lambda: _gpus(env), within_s=3 * facts.NVIDIA_SMI_S),
        Section(
            title="Processors and memory", look=lambda: resource_limits.processors(resource_limits.Share.inspect())
        ),
        Section(
            title="Folder of runs",
            look=lambda: runs_folder.runs_folder(request.folder, on_cluster=answers().reached, in_container=inside),
            within_s=FOLDER_S,
            on_hang=f"its file system hangs: is its server up (`df {request.folder}`)? Choose another by --runs-dir",
        ),
        Section(
            title="MLflow",
            look=lambda: _store(request),
            within_s=STORE_S,
            on_hang="its host's name may not resolve, or its database hangs: points wait in the run folder meanwhile",
        ),
        Section(
            title="Names",
            look=lambda: _names(answers),
            within_s=host_name.GIVE_UP_S + SLURM_S,
        ),
        Section(title="Slurm", look=lambda: slurm.client(answers(), user, in_container=inside), within_s=SLURM_S),
        Section(title="Partitions", look=lambda: slurm.partitions(answers()), within_s=SLURM_S),
        Section(title="How jobs end", look=lambda: job_endings.endings(answers()), within_s=SLURM_S),
        Section(
            title="Containers",
            look=lambda: container_runtimes.runtimes(
                container_runtimes.Host.inspect(user, has_gpus), wanted=not inside
            ),
            within_s=3 * container_runtimes.ANSWER_S,
        ),
    ]
    if inside:
        found = resource_limits.look_inside(image_facts(env), env)
        sections.insert(0, Section(title="This container", look=lambda: resource_limits.container(found)))
    return sections


def _software(*, on_cluster: bool) -> list[Check]:
    found = facts.versions()
    return software.software(torch_wanted=not on_cluster, cuda=found.get("cuda", ""), driver=found.get("driver", ""))


def _gpus(env: Mapping[str, str]) -> list[Check]:
    found = facts.gpus()
    driver = facts.versions().get("driver", "")
    return gpus.gpus(found, facts.visible_gpus(len(found), env), facts.gpu_device_files(), driver)


def _trials(env: Mapping[str, str]) -> list[Check]:
    """Two ranks on the CPUs as `hpcdist run` starts them, and one for each GPU."""
    if not software.version_of("torch"):
        return []
    with ThreadPoolExecutor() as pool:
        on_cpus = pool.submit(torch_trials.try_ranks, "cpu", "gloo", 2)
        count = facts.visible_gpus(len(facts.gpus()) or facts.gpu_device_files(), env)
        on_gpus = torch_trials.try_ranks("cuda", "nccl", count) if count else []
        tried = on_cpus.result()
    checks = [*torch_trials.judge_torch(tried), *torch_trials.judge_ranks(tried, "2 ranks, gloo")]
    if on_gpus:
        checks += torch_trials.judge_ranks(on_gpus, f"{count} rank{'s' * (count > 1)}, nccl")
    return checks


def _store(request: Request) -> list[Check]:
    if request.store is None:
        return [Check(name="store", level="warning", text=request.store_problem)]
    database = request.store.database
    kind = storage.file_system(storage.existing(database)) if database is not None else ""
    return store(request.store, request.env, "" if kind in storage.LOCAL else kind)


def _names(answers: slurm.Once) -> list[Check]:
    host = socket.gethostname()
    lookups = facts.Lookups([host], [host])
    found = lookups.result(host_name.GIVE_UP_S)[host]
    return host_name.names(host, found, is_node=_is_node(answers()))


def _is_node(found: slurm.Answers) -> bool:
    """Whether this machine is one that Slurm starts jobs on."""
    here = socket.gethostname().partition(".")[0]
    groups = (group for partition in found.partitions or [] for group in partition.nodes)
    return any(here in expand(group.names) for group in groups)
