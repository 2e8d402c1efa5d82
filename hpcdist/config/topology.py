"""The topology of a run as seen from one rank, read once from the environment variables of the launcher.

`Topology.from_env` uses the ten variables of hpcdist, which the supervisor of a local run sets, or those of Slurm in a
task of an srun step. HPCDIST_MASTER_ADDR, HPCDIST_MASTER_PORT, HPCDIST_JOB_ID and HPCDIST_ATTEMPT also override the
values of Slurm individually; a supervisor that restarts a step sets HPCDIST_ATTEMPT. An empty variable counts as not
set. Incomplete or contradictory variables are an error, because a rank with a wrong topology makes all others hang.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from hpcdist.config.slurm_notation import expand, expand_tasks
from hpcdist.errors import TopologyError, shortened

T = TypeVar("T")
#: hpcdist's variables for the place of a rank among the others.
OWN_PLACE = (
    "HPCDIST_RANK",
    "HPCDIST_WORLD_SIZE",
    "HPCDIST_LOCAL_RANK",
    "HPCDIST_LOCAL_WORLD_SIZE",
    "HPCDIST_NODE_RANK",
    "HPCDIST_NUM_NODES",
)
#: hpcdist's variables for how the ranks of an attempt meet, equal on all ranks.
OWN_RENDEZVOUS = ("HPCDIST_MASTER_ADDR", "HPCDIST_MASTER_PORT", "HPCDIST_JOB_ID", "HPCDIST_ATTEMPT")


class Variables:
    """Reads the variables of one launcher; an empty variable counts as not set."""

    def __init__(self, env: Mapping[str, str], fix: str) -> None:
        self.env = env
        self.fix = fix

    def has(self, name: str) -> bool:
        """Return whether a variable is set and not empty."""
        return bool(self.env.get(name))

    def text(self, name: str, default: str | None = None) -> str:
        """Return the value of a variable. Raises TopologyError if it is not set and has no default."""
        if self.has(name):
            return self.env[name]
        if default is None:
            raise self.error(f"{name} must be set")
        return default

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number >= 0 of at most ten digits, which covers all numbers of Slurm."""
        if default is not None and not self.has(name):
            return default
        value = self.text(name)
        if re.fullmatch(r"[0-9]{1,10}", value) is None:
            raise self.error(f"{name} must be a whole number, got {shortened(value)!r}")
        return int(value)

    def parsed(self, name: str, parse: Callable[[str], T]) -> T:
        """Return the result of `parse` for a variable; its TopologyError gets the name of the variable and the fix."""
        value = self.text(name)  # its error names the variable itself
        try:
            return parse(value)
        except TopologyError as error:
            raise self.error(f"{name}: {error}") from error

    def shown(self, names: Iterable[str]) -> str:
        """Return `NAME=value` of the variables that are set, for a message."""
        return ", ".join(f"{name}={shortened(self.env[name])}" for name in names if self.has(name))

    def missing(self, names: Iterable[str]) -> str:
        """Return the names of the variables that are not set, for a message; empty if all are."""
        return ", ".join(name for name in names if not self.has(name))

    def error(self, problem: str) -> TopologyError:
        """Return the error for a problem, with the fix for variables of this launcher."""
        return TopologyError(f"{problem}; {self.fix}")


#: First port of the ranks. Together with the next line: neither privileged nor ephemeral (32768-60999 on Linux), so
#: that no client socket uses such a port.
_PORTS_START = 20480
_NUM_PORTS = 12281  #: prime, so that multiples of _PORTS_PER_JOB cover all ports
_PORTS_PER_JOB = 16  #: ports between those of jobs with consecutive numbers
_MAX_PORT = 2**16 - 1
#: Slurm numbers the batch, extern and interactive steps of a job from here to 2**32.
_SPECIAL_STEPS_START = 0xFFFFFFF0
#: Fixes in messages about the variables of each launcher.
_OWN_FIX = "let `hpcdist run` or `hpcdist submit` start the ranks, or unset these variables"
SLURM_FIX = "start the ranks with srun and pass its SLURM_ variables on unchanged, also into containers"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The position of a rank in the run. Inconsistent values raise TopologyError, which names the fields."""

    rank: int
    """0 to world_size - 1; ranks are not always ordered by node (srun --distribution)."""
    world_size: int
    """Number of ranks on all nodes."""
    local_rank: int
    """0 to local_world_size - 1, among the ranks of this node."""
    local_world_size: int
    """Number of ranks on this node; it may differ between nodes."""
    node_rank: int
    """0 to num_nodes - 1."""
    num_nodes: int
    """Number of nodes, each with at least one rank."""
    hosts: tuple[str, ...] = ()
    """Names of all nodes in node order; empty if they are not known."""
    master_addr: str
    """Host name or address of rank 0."""
    master_port: int
    """TCP port of the store, for the rendezvous of ranks on several machines."""
    launcher: Literal["hpcdist", "slurm"]
    """The launcher that has set the variables."""
    job_id: str
    """Slurm's job id, or the id of a local run."""
    attempt: int
    """Number of the attempt; each restart increases it by one."""

    def __post_init__(self) -> None:
        is_alone = self.num_nodes == 1
        num_here = self.local_world_size
        num_ranks = self.world_size
        rules = {
            "0 <= rank < world_size": 0 <= self.rank < num_ranks,
            "0 <= local_rank < local_world_size": 0 <= self.local_rank < num_here,
            "0 <= node_rank < num_nodes": 0 <= self.node_rank < self.num_nodes,
            "local_world_size == world_size if num_nodes == 1": not is_alone or num_here == num_ranks,
            # Each of the other nodes has at least one rank.
            "local_world_size + num_nodes <= world_size + 1": num_here + self.num_nodes <= num_ranks + 1,
            "num_nodes names in hosts, or none": len(self.hosts) in (0, self.num_nodes),
            "distinct names in hosts": len(set(self.hosts)) == len(self.hosts),
            "a name or address in master_addr": re.fullmatch(r"\S+", self.master_addr),
            "1 <= master_port <= 65535": 1 <= self.master_port <= _MAX_PORT,
            "a job_id without spaces": re.fullmatch(r"\S+", self.job_id),
            "attempt >= 0": self.attempt >= 0,
        }
        for rule, holds in rules.items():
            if not holds:
                # The fields that the rule mentions.
                names = [name for name in self.__dataclass_fields__ if re.search(rf"\b{name}\b", rule)]
                values = ", ".join(f"{name}={shortened(repr(getattr(self, name)))}" for name in names)
                raise TopologyError(f"a topology requires {rule}, got {values}")

    @property
    def token(self) -> str:
        """Identifier of the attempt, which ranks compare when they connect; it is not secret."""
        return f"hpcdist/{self.job_id}/{self.attempt}"

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "Topology":
        """Return the topology described by environment variables, with the precedence documented in this module.

        Raises TopologyError; its message names the variables, their values and a fix.
        """
        if any(env.get(name) for name in OWN_PLACE):
            return _from_own(Variables(env, _OWN_FIX))
        slurm = Variables(env, SLURM_FIX)
        step = slurm.text("SLURM_STEP_ID", "")
        # SLURM_PROCID alone is also set in the shell of sbatch, which runs in the batch step.
        is_srun_step = re.fullmatch(r"[0-9]{1,10}", step) and int(step) < _SPECIAL_STEPS_START
        if not (is_srun_step and slurm.has("SLURM_PROCID")):
            seen = slurm.shown(("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", *OWN_RENDEZVOUS)) or "no variable"
            raise slurm.error(f"this process is neither a rank of `hpcdist run` nor an srun task ({seen})")
        return _from_slurm(slurm)


def port_for(job_id: str, attempt: int) -> int:
    """Return the TCP port of an attempt in 20480-32760, which every rank computes independently.

    Consecutive attempts have different ports. The first 16 attempts of two jobs with consecutive numbers (1234 and
    1235, run-1 and run-2) also have different ports. Two other jobs have the same port with a probability of 1 in
    12281.
    """
    # The number at the end counts up from one job to the next; the text before it is hashed.
    match = re.fullmatch(r"(.*?)([0-9]{0,18})", job_id, re.DOTALL)
    assert match is not None, "the pattern matches any text"
    text, number = match.groups()
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).digest()
    job = int.from_bytes(digest[:8]) + int(number or 0)
    return _PORTS_START + (job * _PORTS_PER_JOB + attempt) % _NUM_PORTS


def _build(variables: Variables, names: Iterable[str], **fields: Any) -> Topology:
    """Return a topology; the error for inconsistent fields shows `names` and the variables of the rendezvous."""
    try:
        return Topology(**fields)
    except TopologyError as error:
        raise variables.error(f"{error} (from {variables.shown((*names, *OWN_RENDEZVOUS))})") from error


def _rendezvous(variables: Variables, addr: str, job_id: str, attempt: int) -> dict[str, Any]:
    """Return the fields of the rendezvous: hpcdist's variables, or the arguments for those that are not set."""
    job_id = variables.text("HPCDIST_JOB_ID", job_id)
    attempt = variables.number("HPCDIST_ATTEMPT", attempt)
    return {
        "master_addr": variables.text("HPCDIST_MASTER_ADDR", addr),
        "master_port": variables.number("HPCDIST_MASTER_PORT", port_for(job_id, attempt)),
        "job_id": job_id,
        "attempt": attempt,
    }


def _from_own(variables: Variables) -> Topology:
    missing = variables.missing((*OWN_PLACE, *OWN_RENDEZVOUS))
    if missing:
        raise variables.error(f"{variables.shown((*OWN_PLACE, *OWN_RENDEZVOUS))} set, but {missing} not")
    place = {name.removeprefix("HPCDIST_").lower(): variables.number(name) for name in OWN_PLACE}
    rendezvous = _rendezvous(variables, addr="", job_id="", attempt=0)  # all of them are set
    return _build(variables, OWN_PLACE, **place, **rendezvous, launcher="hpcdist")


def _from_slurm(variables: Variables) -> Topology:
    count_name = "SLURM_STEP_NUM_TASKS"
    nodes_name = "SLURM_STEP_NODELIST"
    tasks_name = "SLURM_STEP_TASKS_PER_NODE"
    rank = variables.number("SLURM_PROCID")
    node_rank = variables.number("SLURM_NODEID")
    hosts = variables.parsed(nodes_name, expand)
    tasks = variables.parsed(tasks_name, expand_tasks)  # number of tasks by node
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", count_name, nodes_name, tasks_name)
    seen = variables.shown(names)
    if len(hosts) != len(tasks):
        raise variables.error(f"{nodes_name} names {len(hosts)} nodes, {tasks_name} counts {len(tasks)} ({seen})")
    if sum(tasks) != variables.number(count_name):
        raise variables.error(f"{tasks_name} adds up to {sum(tasks)} tasks, but {count_name} differs ({seen})")
    if node_rank >= len(hosts):
        raise variables.error(
            f"SLURM_NODEID is not less than the number of nodes in {nodes_name}, {len(hosts)} ({seen})"
        )
    # All ranks assume that rank 0 is on the first node, unless they are told where it is.
    if rank == 0 and node_rank > 0 and not variables.has("HPCDIST_MASTER_ADDR"):
        problem = f"rank 0 is expected on {hosts[0]}, but it is on {hosts[node_rank]} ({seen})"
        fix = f"set HPCDIST_MASTER_ADDR={hosts[node_rank]} for all ranks, or remove --distribution=arbitrary"
        raise TopologyError(f"{problem}; {fix}")
    job_id = variables.text("SLURM_JOB_ID")
    attempt = variables.number("SLURM_RESTART_COUNT", 0)
    return _build(
        variables,
        (*names, "SLURM_JOB_ID"),
        rank=rank,
        world_size=sum(tasks),
        local_rank=variables.number("SLURM_LOCALID"),
        local_world_size=tasks[node_rank],
        node_rank=node_rank,
        num_nodes=len(hosts),
        hosts=tuple(hosts),
        **_rendezvous(variables, hosts[0], job_id, attempt),
        launcher="slurm",
    )
