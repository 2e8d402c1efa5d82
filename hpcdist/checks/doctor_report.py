"""`hpcdist doctor`: its sections about a machine or a run, run with time limits."""

import os
import secrets
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdist.checks import machine_checks
from hpcdist.checks.node_probe import ProbeRequest, probe_command, witness_in
from hpcdist.checks.preflight import Needs, check_nodes
from hpcdist.checks.resource_checks import ResourceLimits, resource_checks
from hpcdist.checks.runs_folder_checks import folder_checks
from hpcdist.checks.runtime_checks import COMMAND_TIMEOUT_S, Host, runtime_checks
from hpcdist.checks.slurm_checks import SlurmFacts, client_checks, job_end_checks, partition_checks, read_slurm
from hpcdist.config.launch_schema import NVIDIA
from hpcdist.config.schema import Config
from hpcdist.config.slurm_notation import expand
from hpcdist.errors import local_time
from hpcdist.host import gpu_info, machine, versions
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
from hpcdist.supervisor.plan import Machine

#: Maximum number of characters of an unexpected error's text.
_MAX_REASON = 300
#: Limit for the controller, partitions and accounting together.
SLURM_S = 45.0
#: Shell functions of environment modules may read a slow file system; so may a failing name lookup of MLflow's server.
SLOW_S = 30.0
#: The first access to a network file system may take seconds.
_FOLDER_S = 60.0
#: Limit for the whole step of the preflight beside the ranks.
STEP_TIMEOUT_S = 60.0
#: Ranks of the training test on CPUs: the least number that has to communicate.
_NUM_CPU_RANKS = 2


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
            waiting([later.title for later, later_future in running[number:] if not later_future.done()])
        left_s = began + section.timeout_s - time.monotonic()
        try:
            checks = future.result(max(0.0, left_s))
        except Exception as error:  # a defect in one section must not end the report
            # A TimeoutError may be the section's own, so the future's state decides.
            if future.done():
                reason = " ".join(str(error).split())[:_MAX_REASON]
                checks = [warning(section.title, f"this section failed: {type(error).__name__}: {reason}")]
            else:
                checks = [warning(section.title, f"no answer within {section.timeout_s:g} s", section.timeout_fix)]
        yield section.title, checks


def machine_sections(env: Mapping[str, str], folder: Path, store: Callable[[], list[Check]]) -> list[Section]:
    """Return the sections about this machine.

    Args:
        folder: the folder of runs, or that of one run.
        store: the checks of MLflow's store.
    """
    user = user_name()
    in_container = bool(container_runtime())
    on_cluster = shutil.which("sbatch") is not None
    slurm = start(read_slurm).result  # one query: each section about Slurm waits for its result

    def software() -> list[Check]:
        return machine_checks.software_checks(versions.versions(), torch_required=not on_cluster)

    def gpus() -> list[Check]:
        known = gpu_info.gpus()
        visible = visible_gpus(len(known), env)
        return machine_checks.all_gpu_checks(
            known, visible, gpu_device_files(), driver_version(), has_amd_driver=gpu_info.has_amd_driver()
        )

    def resources() -> list[Check]:
        return resource_checks(ResourceLimits.inspect())

    def runs() -> list[Check]:
        return folder_checks(folder, on_cluster=slurm().reached, in_container=in_container)

    def host_name() -> list[Check]:
        host = socket.gethostname()
        lookup = start(lambda: machine.look_up(host))
        is_node = _is_node(slurm(), host.partition(".")[0])
        result = done_within(machine_checks.GIVE_UP_S, lookup, {"late": machine_checks.GIVE_UP_S})
        return machine_checks.host_name_checks(host, result, is_node=is_node)

    def runtimes() -> list[Check]:
        host = Host.inspect(user, gpu_device_files() > 0, slurm().proctrack)
        return runtime_checks(host, expected=not in_container)

    folder_fix = f"its file system hangs: see `df {folder}`, or set another HPCDIST_RUNS_DIR"
    store_fix = "its host name may not resolve, or its database hangs; metrics wait in the run folder"
    return [
        Section("Software", software),
        Section("Training test", lambda: _trials(env), timeout_s=machine_checks.TRIAL_S + 10),
        Section("GPUs", gpus, timeout_s=3 * DRIVER_S),
        Section("Processors and memory", resources),
        Section("Folder of runs", runs, timeout_s=_FOLDER_S, timeout_fix=folder_fix),
        Section("MLflow", store, timeout_s=SLOW_S, timeout_fix=store_fix),
        Section("Host name", host_name, timeout_s=machine_checks.GIVE_UP_S + SLURM_S),
        Section("Slurm", lambda: client_checks(slurm(), user, in_container=in_container), timeout_s=SLURM_S),
        Section("Partitions", lambda: partition_checks(slurm()), timeout_s=SLURM_S),
        Section("End of jobs", lambda: job_end_checks(slurm()), timeout_s=SLURM_S),
        Section("Containers", runtimes, timeout_s=3 * COMMAND_TIMEOUT_S + SLURM_S),
    ]


def _is_node(slurm: SlurmFacts, host: str) -> bool:
    """Return whether a host is a node of a partition."""
    groups: list[NodeGroup] = []
    for partition in slurm.partitions or []:
        groups += partition.nodes
    return any(host in expand(group.names) for group in groups)


def _trials(env: Mapping[str, str]) -> list[Check]:
    """Start ranks on the CPUs and, at the same time, on the GPUs; report the network of local runs."""
    if "torch" not in versions.versions():
        return []
    checks = []
    with ThreadPoolExecutor() as pool:
        on_cpus = pool.submit(machine_checks.trial_checks, "cpu", _NUM_CPU_RANKS, env)
        # As many as a run has. If NVIDIA's driver fails, the trial shows its error.
        num_gpus = Machine.inspect(env).num_gpus
        if num_gpus:
            checks += machine_checks.trial_checks(NVIDIA, num_gpus, env)
        checks += on_cpus.result()
    return [*checks, _network_check()]


def _network_check() -> Check:
    reason = private_network.why_refused()
    if reason:
        text = f"the ranks of a local run use this machine's loopback: a network namespace is refused ({reason})"
        return note("network", text)
    return ok("network", "the ranks of hpcdist's trainers run in a network namespace that no other user reaches")


def run_sections(run: RunDir, config: Config) -> list[Section]:
    """Return the sections about one run: its state, and for a run in Slurm its nodes."""
    sections = [Section("Run", lambda: _status(run), timeout_s=SLOW_S)]
    if job_of(run) is not None:
        sections += [
            Section("Nodes in Slurm", lambda: _node_states(run), timeout_s=SLOW_S),
            Section("Node preflight", lambda: _ask_nodes(run, config), timeout_s=STEP_TIMEOUT_S + SLOW_S),
        ]
    return sections


def _status(run: RunDir) -> list[Check]:
    now = status_of(run)
    checks = [status_check(run, now)]
    if now.slurm_error:  # the status is then that of the run folder
        text = f"Slurm cannot be reached: {now.slurm_error}"
        checks.append(warning("Slurm", text, "the node states below may be outdated; see `hpcdist doctor`"))
    started = (read_json(run.environment) or {}).get("host", "")
    if job_of(run) is None and started and started != socket.gethostname():
        text = f"the run was started on {started}; the sections below are about this machine, {socket.gethostname()}"
        checks.append(note("host", text, f"`hpcdist doctor {run.name}` on {started}"))
    return checks


def status_check(run: RunDir, now: RunStatus) -> Check:
    """Return the state of a run as a result, with the command that continues or explains it."""
    job = ""
    if now.facts is not None and not now.is_lost:
        job = f"; {now.facts.describe(time.time())}"
    text = f"{now.sentence}{job}"
    if now.name == "lost":
        fix = f"`hpcdist resume {run.name}` continues it, `hpcdist sync {run.name}` closes it in MLflow"
        return warning("state", text, fix)
    if now.name == "failed":
        return warning("state", text, f"for the cause run `hpcdist explain {run.name}`")
    return ok("state", text)


def _node_states(run: RunDir) -> list[Check]:
    """Check the state of the nodes that the run's job has or has had, the newest first."""
    now = status_of(run)
    nodes: list[str] = []
    if now.facts is not None and now.facts.nodes:
        nodes += expand(now.facts.nodes)
    for job_start in reversed(job_starts(run)):
        nodes += expand(str(job_start.get("nodes", "")))
    nodes = list(dict.fromkeys(nodes))  # each once
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
            fix = (
                "Slurm starts no jobs there; `hpcdist resume` gets other nodes. After the repair an administrator runs"
                f" `scontrol update nodename={name} state=resume`"
            )
            state = _state_text(node)
            bad.append(warning(name, state, fix, node=name))
        else:
            healthy[node.state] += 1
    if not healthy:
        return bad
    counts = ", ".join(f"{count} {state}" for state, count in healthy.items())
    name = "others" if bad else "nodes"
    return [*bad, ok(name, counts)]


def _state_text(node: NodeState) -> str:
    """Return the state of a node, since when it has it, and the reason."""
    text = node.state
    if "*" in node.state:  # Slurm's mark
        text += " (does not answer)"
    if node.since is not None:
        text += f", since {local_time(node.since)}"
    if node.reason:
        text += f", {node.reason!r}"
        if node.user:
            text += f" by {node.user}"
    return text


def _ask_nodes(run: RunDir, config: Config) -> list[Check]:
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
    needs = _needs(run, config, nodes)
    # The nodes must see this new file in the run folder.
    with witness_in(run.path / f".doctor-{secrets.token_hex(4)}") as (witness, token):
        request = ProbeRequest(
            first_node=nodes[0],
            run_folder=needs.run_folder,
            checkpoint_folder=str(run.checkpoints),
            witness=str(witness),
            token=token,
        )
        flags: dict[str, Any] = {"jobid": job_id, "mem": 0}
        flags["time"] = 2  # minutes, after which Slurm ends the step even if srun was killed
        if needs.gpus_per_node:
            flags["gpus-per-node"] = config.cluster.gpu_request
        step = ["srun", *task_words(nodes, probe_command(request), "doctor", flags)]
        asked_at = time.time()
        answers, _, errors, is_late = ask(step, nodes, STEP_TIMEOUT_S, env=_env_outside_jobs())
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


def _needs(run: RunDir, config: Config, nodes: Sequence[str]) -> Needs:
    gpus_per_node = 0
    if config.launch.device != "cpu":
        gpus_per_node = config.cluster.gpus_per_node
    return Needs(
        nodes=tuple(nodes),
        run_folder=str(run.path),
        gpus_per_node=gpus_per_node,
        gpu_type=config.launch.gpu_type,
        backend=config.launch.backend_on(gpus=gpus_per_node > 0),
    )


def _env_outside_jobs() -> dict[str, str]:
    """Return this environment without the variables of a job, from which srun would take missing options."""
    env = {}
    for name, value in os.environ.items():
        if name == "SLURM_CONF" or not name.startswith("SLURM_"):
            env[name] = value
    return env
