"""`hpcdist doctor`: its sections about a machine or a run, run with time limits, and the page that shows them."""

import os
import secrets
import shutil
import socket
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcdist.checks import machine_checks as checks_machine
from hpcdist.checks import site
from hpcdist.checks.node_probe import ProbeRequest, probe_command, witness_in
from hpcdist.checks.preflight import Needs, check_nodes
from hpcdist.checks.site import client_checks, job_end_checks, partition_checks, read_slurm
from hpcdist.config.launch_schema import NVIDIA
from hpcdist.config.schema import Config
from hpcdist.config.slurm_notation import expand
from hpcdist.errors import plural
from hpcdist.host import gpu_info, versions
from hpcdist.host import machine as host_machine
from hpcdist.host.check_result import Check, note, ok, warning
from hpcdist.host.gpu_info import DRIVER_S, driver_version, gpu_device_files, visible_gpus
from hpcdist.host.image_identity import container_runtime
from hpcdist.host.json_files import read_json
from hpcdist.host.time_limits import done_within, last_line, start
from hpcdist.rank import private_network
from hpcdist.run.folder import RunDir
from hpcdist.run.job_record import job_starts
from hpcdist.run.lease import user_name
from hpcdist.run.status import RunStatus, job_of, status_of
from hpcdist.slurm import client
from hpcdist.slurm.on_nodes import ask, task_words
from hpcdist.slurm.output import NodeGroup, NodeState, SlurmError, is_usable


@dataclass(frozen=True)
class Section:
    """A part of the report that runs in its own thread; a timeout becomes a warning."""

    title: str
    run: Callable[[], list[Check]]  #: it may block; its thread is abandoned after the timeout
    timeout_s: float = 20.0
    timeout_fix: str = "a file system or service may hang: see `dmesg`, `df` and `ps` on this machine"


def execute(
    sections: Sequence[Section], waiting: Callable[[Sequence[str]], None] = lambda titles: None
) -> Iterator[tuple[str, list[Check]]]:
    """Run all sections at once; yield the title and results of each, in order, as soon as they are known."""
    began = time.monotonic()
    running = [(section, start(section.run)) for section in sections]
    for number, (section, future) in enumerate(running):
        if not future.done():
            waiting([other.title for other, its_future in running[number:] if not its_future.done()])
        left_s = began + section.timeout_s - time.monotonic()
        try:
            checks = future.result(max(0.0, left_s))
        except Exception as error:  # a defect in one section must not end the report
            # A section may raise TimeoutError by itself, so the future's state decides.
            if future.done():
                reason = " ".join(str(error).split())[:300]
                checks = [warning(section.title, f"this section failed: {type(error).__name__}: {reason}")]
            else:
                checks = [warning(section.title, f"no answer within {section.timeout_s:g} s", section.timeout_fix)]
        yield section.title, checks


#: Limit for the controller, partitions and accounting together.
SLURM_S = 45.0
#: Shell functions of environment modules may read a slow file system; so may a failing name lookup of MLflow's server.
SLOW_S = 30.0


def machine_sections(env: Mapping[str, str], folder: Path, store: Callable[[], list[Check]]) -> list[Section]:
    """Return the sections about this machine; `folder`: of runs, or of one run; `store`: the checks of MLflow."""
    user = user_name()
    inside = bool(container_runtime())
    slurm = start(read_slurm).result  # one query for all sections

    def gpus() -> list[Check]:
        found, num_files = gpu_info.gpus(), gpu_device_files()
        visible = visible_gpus(len(found), env)
        return checks_machine.all_gpu_checks(found, visible, num_files, driver_version())

    def host_name() -> list[Check]:
        host = socket.gethostname()
        lookup = start(lambda: host_machine.look_up(host))
        is_node = _is_node(slurm(), host.partition(".")[0])
        found = done_within(checks_machine.GIVE_UP_S, lookup, {"late": checks_machine.GIVE_UP_S})
        return checks_machine.host_name_checks(host, found, is_node=is_node)

    def runtimes() -> list[Check]:
        host = checks_machine.Host.inspect(user, gpu_device_files() > 0, slurm().proctrack)
        return checks_machine.runtime_checks(host, expected=not inside)

    on_cluster = shutil.which("sbatch") is not None
    return [
        Section("Software", lambda: checks_machine.software_checks(versions.versions(), torch_required=not on_cluster)),
        Section("Training test", lambda: _trials(env), checks_machine.TRIAL_S + 10),
        Section("GPUs", gpus, 3 * DRIVER_S),
        Section(
            "Processors and memory", lambda: checks_machine.resource_checks(checks_machine.ResourceLimits.inspect())
        ),
        Section(
            "Folder of runs",
            lambda: site.folder_checks(folder, on_cluster=slurm().reached, in_container=inside),
            60.0,  # the first access to a network file system may take seconds
            f"its file system hangs: see `df {folder}`, or set another HPCDIST_RUNS_DIR",
        ),
        Section(
            "MLflow",
            store,
            SLOW_S,
            "its host name may not resolve, or its database hangs; metrics wait in the run folder",
        ),
        Section("Host name", host_name, checks_machine.GIVE_UP_S + SLURM_S),
        Section("Slurm", lambda: client_checks(slurm(), user, in_container=inside), SLURM_S),
        Section("Partitions", lambda: partition_checks(slurm()), SLURM_S),
        Section("End of jobs", lambda: job_end_checks(slurm()), SLURM_S),
        Section("Containers", runtimes, 3 * checks_machine.TIMEOUT_S + SLURM_S),
    ]


def _is_node(slurm: site.SlurmFacts, host: str) -> bool:
    """Return whether a host is a node of a partition."""
    groups: list[NodeGroup] = []
    for partition in slurm.partitions or []:
        groups += partition.nodes
    return any(host in expand(group.names) for group in groups)


def _trials(env: Mapping[str, str]) -> list[Check]:
    if "torch" not in versions.versions():
        return []
    checks = []
    with ThreadPoolExecutor() as pool:
        on_cpus = pool.submit(checks_machine.trial_checks, "cpu", 2, env)
        num_gpus = visible_gpus(len(gpu_info.gpus()) or gpu_device_files(), env)
        if num_gpus:
            checks += checks_machine.trial_checks(NVIDIA, num_gpus, env)
        checks += on_cpus.result()
    reason = private_network.why_refused()
    if reason:
        text = f"the ranks of a local run use this machine's loopback: a network namespace is refused ({reason})"
        return [*checks, note("network", text)]
    text = "the ranks of hpcdist's trainers run in a network namespace that no other user reaches"
    return [*checks, ok("network", text)]


#: Limit for the whole step of the preflight beside the ranks.
STEP_TIMEOUT_S = 60.0


def run_sections(run: RunDir, config: Config) -> list[Section]:
    """Return the sections about one run: its state, and for a run in Slurm its nodes."""
    sections = [Section("Run", lambda: _status(run), timeout_s=SLOW_S)]
    if job_of(run) is not None:
        sections += [
            Section("Nodes in Slurm", lambda: _node_states(run), timeout_s=SLOW_S),
            Section("Node preflight", lambda: _live(run, config), timeout_s=STEP_TIMEOUT_S + SLOW_S),
        ]
    return sections


def _status(run: RunDir) -> list[Check]:
    now = status_of(run)
    checks = [status_check(run, now)]
    if now.slurm_error:
        text = f"Slurm cannot be reached: {now.slurm_error}"
        checks.append(warning("Slurm", text, "the node states below may be outdated; see `hpcdist doctor`"))
    started = (read_json(run.environment) or {}).get("host", "")
    if job_of(run) is None and started and started != socket.gethostname():
        text = f"the run was started on {started}; the sections below are about this machine, {socket.gethostname()}"
        checks.append(note("host", text, f"`hpcdist doctor {run.name}` on {started}"))
    return checks


def status_check(run: RunDir, now: RunStatus) -> Check:
    """Return the state of a run as a result, with the command that continues or explains it."""
    text = now.sentence
    if now.facts is not None and not now.is_lost:
        text += f"; {now.facts.describe(time.time())}"
    if now.name == "lost":
        fix = f"`hpcdist resume {run.name}` continues it, `hpcdist sync {run.name}` closes it in MLflow"
        return warning("state", text, fix)
    if now.name == "failed":
        return warning("state", text, f"for the cause run `hpcdist explain {run.name}`")
    return ok("state", text)


def _node_states(run: RunDir) -> list[Check]:
    now = status_of(run)
    nodes: list[str] = []
    if now.facts is not None and now.facts.nodes:
        nodes += expand(now.facts.nodes)
    for job_start in reversed(job_starts(run)):
        nodes += expand(str(job_start.get("nodes", "")))
    nodes = list(dict.fromkeys(nodes))
    if not nodes:
        return []
    try:
        states = client.node_states(names=nodes)
    except SlurmError as error:
        return [warning("nodes", f"Slurm does not report their states: {error}", "see `hpcdist doctor`")]
    return node_checks(states, nodes)


def node_checks(states: Sequence[NodeState], nodes: Sequence[str]) -> list[Check]:
    """Report the nodes to which Slurm sends no jobs, and the number of the others by state."""
    known = {state.name: state for state in states}
    bad = []
    healthy = Counter[str]()
    for name in nodes:
        node = known.get(name)
        if node is None:
            bad.append(warning(name, "Slurm has no node of this name any more", node=name))
        elif not is_usable(node.state):
            fix = "Slurm starts no jobs there; `hpcdist resume` gets other nodes. "
            fix += f"After the repair an administrator runs `scontrol update nodename={name} state=resume`"
            bad.append(warning(name, _state_text(node), fix, node=name))
        else:
            healthy[node.state] += 1
    if not healthy:
        return bad
    counts = ", ".join(f"{count} {state}" for state, count in healthy.items())
    return [*bad, ok("others" if bad else "nodes", counts)]


def _state_text(node: NodeState) -> str:
    """Return the state of a node, since when it has it, and the reason."""
    text = node.state
    if "*" in node.state:
        text += " (does not answer)"
    if node.since is not None:
        text += f", since {time.strftime('%Y-%m-%d %H:%M', time.localtime(node.since))}"
    if node.reason:
        text += f", {node.reason!r}"
        if node.user:
            text += f" by {node.user}"
    return text


def _live(run: RunDir, config: Config) -> list[Check]:
    """Ask each node of the run's job as the preflight does, in a step that overlaps the ranks' (`srun --overlap`).

    The nodes join no group: it would take time from the ranks. The preflight's file has its result.
    """
    now = status_of(run)
    job = job_of(run)
    if now.facts is None or job is None or now.facts.state != "RUNNING" or shutil.which("srun") is None:
        return [ok("nodes", "not run: the run has no nodes at present")]
    try:
        job_id = client.numeric_id(job.id)
    except SlurmError as error:
        return [warning("nodes", f"not asked, since Slurm does not answer: {error}", "see `hpcdist doctor`")]
    nodes = expand(now.facts.nodes)
    gpus = config.cluster.gpus_per_node if config.launch.device != "cpu" else 0
    needs = Needs(
        nodes=tuple(nodes),
        run_folder=str(run.path),
        gpus_per_node=gpus,
        backend=config.launch.backend_on(gpus=gpus > 0),
    )
    with witness_in(run.path / f".doctor-{secrets.token_hex(4)}") as (witness, token):
        request = ProbeRequest(
            first_node=nodes[0],
            run_folder=needs.run_folder,
            checkpoint_folder=str(run.checkpoints),
            witness=str(witness),
            token=token,
        )
        # Inside another job, srun would take missing options from that job's variables.
        env = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or name[:6] != "SLURM_"}
        gpu_request = config.cluster.gpu_request if gpus else None
        # Slurm ends the step after two minutes even if srun was killed.
        flags = {"jobid": job_id, "time": 2, "mem": 0, "gpus-per-node": gpu_request}
        step = ["srun", *task_words(nodes, probe_command(request), "doctor", flags)]
        asked_at = time.time()
        answers, _, errors, is_late = ask(step, nodes, STEP_TIMEOUT_S, env=env)
        answered_at = time.time()
    look = f"`srun --jobid={job_id} --overlap hostname`"
    if is_late:
        text = f"a step beside the ranks did not finish within {STEP_TIMEOUT_S:g} s"
        return [warning("nodes", text, f"{look} shows the node that does not answer")]
    if not answers:
        message = last_line(errors) or "srun printed nothing"
        return [warning("nodes", f"no node answered: {message}", look)]
    # The ranks use the memory of the GPUs, which is no problem here.
    without_use = {}
    for node, answer in answers.items():
        gpus_without_use = [{**gpu, "used_mb": None} for gpu in answer.get("gpus", ())]
        without_use[node] = {**answer, "gpus": gpus_without_use}
    return check_nodes(needs, without_use, asked_at, answered_at)


#: Sections: title and results.
Page = Sequence[tuple[str, Sequence[Check]]]
#: Widths of the columns, and the column of the text.
_INDENT, _MARK, _NAME = 2, 9, 15
_TEXT = _INDENT + _MARK + _NAME
#: On a narrower terminal, the terminal breaks the lines.
_MIN_WIDTH = 60


def section_lines(title: str, checks: Sequence[Check], width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of one section, each with its style: `title`, a level, or empty."""
    if checks:
        yield "title", title
    for check in checks:
        name = check.name
        if check.node != check.name:
            name = f"{check.node} {check.name}".strip()
        mark = check.level.upper() if check.level == "failure" else check.level
        head = f"{'':{_INDENT}}{mark:<{_MARK}}{name:<{_NAME}}"
        if not head.endswith(" "):
            head += " "
        yield from _wrapped(check.level, head, check.text, width, _TEXT)
        if check.fix:
            yield from _wrapped("", f"{'':{_TEXT}}→ ", check.fix, width, _TEXT + 2)


def _wrapped(kind: str, head: str, text: str, width: int, indent: int) -> Iterator[tuple[str, str]]:
    # rich would break long words such as paths and commands.
    lines = textwrap.wrap(
        text,
        max(width, _MIN_WIDTH),
        initial_indent=head,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for number, line in enumerate(lines or [head]):
        yield (kind if number == 0 else ""), line.rstrip()


def summary_lines(page: Page, width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of the summary, each with its style: whether a run would fail, and why."""
    failures = []
    num_warnings = 0
    for title, checks in page:
        failures += [(title, check) for check in checks if check.level == "failure"]
        num_warnings += sum(check.level == "warning" for check in checks)
    others = f"{plural(num_warnings, 'warning')} above" if num_warnings else "no warnings"
    if not failures:
        yield "ok", f"No problem found that would make a run fail; {others}."
        return
    yield "failure", f"{plural(len(failures), 'problem')} would make a run fail ({others}):"
    for title, check in failures:
        where = f"{check.node}: " if check.node else ""
        yield from _wrapped("", "  - ", f"{where}{title}, {check.name}: {check.text}", width, 4)


def document(page: Page, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report as a document: `facts` (version, host, time, …), `would_fail`, and all checks by section."""
    checks = [{"section": title, **asdict(check)} for title, found in page for check in found]
    return {**facts, "would_fail": would_fail(page), "checks": checks}


def would_fail(page: Page) -> bool:
    """Return whether a run would fail: whether the report has a failure."""
    return any(check.level == "failure" for _, checks in page for check in checks)
