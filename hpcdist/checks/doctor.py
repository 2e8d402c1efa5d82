"""`hpcdist doctor`: its sections about a machine, run with time limits, and the page that shows them."""

from __future__ import annotations

import shutil
import socket
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcdist.checks import containers
from hpcdist.checks import machine as checks_machine
from hpcdist.checks import storage as checks_storage
from hpcdist.checks.containers import container_checks, program_checks
from hpcdist.checks.machine import ResourceLimits, all_gpu_checks, resource_checks, trial_checks
from hpcdist.checks.slurm import SlurmFacts, client_checks, job_end_checks, partition_checks, read_slurm
from hpcdist.checks.storage import store_checks
from hpcdist.host import machine as host_machine
from hpcdist.host import storage as host_storage
from hpcdist.host.commands import start
from hpcdist.host.machine import Check, Level, container_runtime, image_facts, note, ok, warning
from hpcdist.host.nodelist import expand
from hpcdist.rank import private_network
from hpcdist.run.lease import user_name
from hpcdist.tracking.uri import sqlite_path

# Sections of doctor's report: each runs in its own thread, and a timeout becomes a warning of the report.


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section of the report.

    Attributes:
        title: heading in the report.
        run: returns the results; it may block, and its thread is abandoned after the timeout.
        timeout_s: limit for `run`.
        timeout_fix: possible causes of a timeout, and the fix.
    """

    title: str
    run: Callable[[], list[Check]]
    timeout_s: float = 20.0
    timeout_fix: str = "a file system or service may hang: see `dmesg`, `df` and `ps` on this machine"


def execute(
    sections: Sequence[Section], waiting: Callable[[Sequence[str]], None] = lambda titles: None
) -> Iterator[tuple[str, list[Check]]]:
    """Run all sections at once; yield the title and results of each, in order, as soon as they are known.

    Args:
        waiting: called with the titles of unfinished sections before each wait.
    """
    began = time.monotonic()
    running = [start(section.run) for section in sections]
    for number, (section, future) in enumerate(zip(sections, running, strict=True)):
        if not future.done():
            waiting(
                [late.title for late, own in zip(sections[number:], running[number:], strict=True) if not own.done()]
            )
        try:
            checks = future.result(max(0.0, section.timeout_s - (time.monotonic() - began)))
        except Exception as error:  # a defect in one section must not end the report
            # A section may raise TimeoutError by itself, so the future's state decides.
            text, fix = f"no answer within {section.timeout_s:g} s", section.timeout_fix
            if future.done():
                text, fix = f"this section failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}", ""
            checks = [warning(section.title, text, fix)]
        yield section.title, checks


# Sections of doctor's report about this machine.

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
    store: str  #: the URI of the MLflow store of a run started on this machine; empty if it cannot be determined
    store_problem: str = ""  #: why the store cannot be determined


def machine_sections(request: Request) -> list[Section]:
    """Return the sections about this machine."""
    env, user = request.env, user_name()
    on_cluster = shutil.which("sbatch") is not None
    has_gpus = host_machine.gpu_device_files() > 0
    inside = bool(container_runtime())
    slurm = start(read_slurm).result  # one query for all sections
    sections = [
        Section(title="Software", run=lambda: _software(on_cluster=on_cluster)),
        Section(title="Training test", run=lambda: _trials(env), timeout_s=checks_machine.TRIAL_S + 10),
        Section(title="GPUs", run=lambda: _gpus(env), timeout_s=3 * host_machine.DRIVER_S),
        Section(
            title="Processors and memory",
            run=lambda: resource_checks(ResourceLimits.inspect()),
        ),
        Section(
            title="Folder of runs",
            run=lambda: checks_storage.folder_checks(request.folder, on_cluster=slurm().reached, in_container=inside),
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
            timeout_s=checks_machine.GIVE_UP_S + SLURM_S,
        ),
        Section(title="Slurm", run=lambda: client_checks(slurm(), user, in_container=inside), timeout_s=SLURM_S),
        Section(title="Partitions", run=lambda: partition_checks(slurm()), timeout_s=SLURM_S),
        Section(title="End of jobs", run=lambda: job_end_checks(slurm()), timeout_s=SLURM_S),
        Section(
            title="Containers",
            run=lambda: containers.runtime_checks(
                containers.Host.inspect(user, has_gpus, slurm().proctrack), expected=not inside
            ),
            timeout_s=3 * containers.TIMEOUT_S + SLURM_S,
        ),
    ]
    if on_cluster:
        sections.append(Section(title="Environments", run=lambda: program_checks(env), timeout_s=ENVIRONMENTS_S))
    if inside:
        sections.insert(0, Section(title="Container", run=lambda: container_checks(image_facts(env), env)))
    return sections


def _software(*, on_cluster: bool) -> list[Check]:
    found = host_machine.versions()
    return checks_machine.software_checks(
        torch_required=not on_cluster, cuda=found.get("cuda", ""), driver=found.get("driver", "")
    )


def _gpus(env: Mapping[str, str]) -> list[Check]:
    found = host_machine.gpus()
    visible = host_machine.visible_gpus(len(found), env)
    return all_gpu_checks(found, visible, host_machine.gpu_device_files(), host_machine.driver_version())


def _trials(env: Mapping[str, str]) -> list[Check]:
    """Start two ranks on CPUs as `hpcdist run` does, and one rank for each GPU."""
    if not checks_machine.version_of("torch"):
        return []
    with ThreadPoolExecutor() as pool:
        on_cpus = pool.submit(trial_checks, "cpu", 2, env)
        count = host_machine.visible_gpus(len(host_machine.gpus()) or host_machine.gpu_device_files(), env)
        on_gpus = trial_checks("cuda", count, env) if count else []
        return [*on_cpus.result(), *on_gpus, _private_network()]


def _private_network() -> Check:
    if reason := private_network.why_refused():
        text = f"the ranks of a local run use this machine's loopback: a network namespace is refused ({reason})"
        return note("network", text)
    return ok("network", "the ranks of hpcdist's trainers run in a network namespace that no other user reaches")


def _store(request: Request) -> list[Check]:
    if not request.store:
        return [warning("store", request.store_problem)]
    database = sqlite_path(request.store)
    kind = host_storage.file_system(host_storage.existing(database)) if database is not None else ""
    return store_checks(request.store, request.env, "" if kind in host_storage.LOCAL else kind)


def _names(found: SlurmFacts) -> list[Check]:
    host = socket.gethostname()
    lookups = host_machine.Lookups([host], [host])
    return checks_machine.host_name_checks(
        host, lookups.result(checks_machine.GIVE_UP_S)[host], is_node=_is_node(found)
    )


def _is_node(found: SlurmFacts) -> bool:
    """Return whether this machine is a node of the cluster."""
    host = socket.gethostname().partition(".")[0]
    groups = (group for partition in found.partitions or [] for group in partition.nodes)
    return any(host in expand(group.names) for group in groups)


# Rendering of doctor's report as text and as a JSON document. Pure functions.

#: Sections: title and results.
Page = Sequence[tuple[str, Sequence[Check]]]
_MARKS: dict[Level, str] = {"ok": "ok", "note": "note", "warning": "warning", "failure": "FAILURE"}
#: Widths of the columns, and the column of the text.
_INDENT, _MARK, _NAME = 2, 9, 15
_TEXT = _INDENT + _MARK + _NAME


def section_lines(title: str, checks: Sequence[Check], width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of one section, each with its style: `title`, a level, or empty."""
    if checks:
        yield "title", title
    for check in checks:
        name = f"{check.node} {check.name}".strip() if check.name != check.node else check.name
        head = f"{'':{_INDENT}}{_MARKS[check.level]:<{_MARK}}{name:<{_NAME}}"
        yield from _wrapped(check.level, head if head.endswith(" ") else f"{head} ", check.text, width, _TEXT)
        if check.fix:
            yield from _wrapped("", f"{'':{_TEXT}}→ ", check.fix, width, _TEXT + 2)


def _wrapped(kind: str, head: str, text: str, width: int, indent: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of a text; rich would break long words such as paths and commands."""
    lines = textwrap.wrap(
        text,
        max(width, 60),
        initial_indent=head,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for number, line in enumerate(lines or [head]):
        yield (kind if number == 0 else ""), line.rstrip()


def summary_lines(page: Page, width: int) -> Iterator[tuple[str, str]]:
    """Yield the summary: the number of warnings, and each failure again."""
    found = [(title, check) for title, checks in page for check in checks]
    failures = [(title, check) for title, check in found if check.level == "failure"]
    warnings = sum(check.level == "warning" for _, check in found)
    others = f"{warnings} warning{'s' * (warnings != 1)} above" if warnings else "no warnings"
    if not failures:
        yield "ok", f"No problem found that would make a run fail; {others}."
        return
    count = "1 problem" if len(failures) == 1 else f"{len(failures)} problems"
    yield "failure", f"{count} would make a run fail ({others}):"
    for title, check in failures:
        where = f"{check.node}: " if check.node else ""
        yield from _wrapped("", "  - ", f"{where}{title}, {check.name}: {check.text}", width, 4)


def document(page: Page, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report as a document: `facts` (version, host, time, …), `would_fail`, and all checks by section."""
    checks = [{"section": title, **asdict(check)} for title, found in page for check in found]
    return {**facts, "would_fail": would_fail(page), "checks": checks}


def would_fail(page: Page) -> bool:
    """Return whether a finding would make a run fail."""
    return any(check.level == "failure" for _, checks in page for check in checks)
