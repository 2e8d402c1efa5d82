"""What a cluster offers: its partitions, their limits and their nodes, as Slurm's commands tell them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hpcdist.slurm.job_info import number, parse_facts

#: States in which a node takes no job, by `sinfo`'s long names; a trailing * marks one that does not answer.
_UNUSABLE = ("down", "drain", "fail", "error", "inval", "unknown", "future")
_GPUS = re.compile(r"\bgpu(?::[^:,()]+)*:([0-9]{1,9})")
_MEMORY = re.compile(r"([0-9]{1,18})([KMGT]?)B?", re.IGNORECASE)
_MB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
#: A controller that is busy takes seconds; one that takes longer does not keep a submission waiting.
PATIENCE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of one partition that are alike."""

    partition: str
    num_nodes: int
    cpus: int
    memory_mb: int
    gpus: int
    usable: bool
    names: str  #: as Slurm writes them, `n[1-4]`


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One partition. `facts` are the words of `scontrol show partition`."""

    name: str
    facts: Mapping[str, str]
    nodes: tuple[NodeGroup, ...]

    def limit(self, key: str) -> int | None:
        """A numeric limit, None where there is none."""
        return number(self.facts.get(key, ""))

    def allowed(self, what: str) -> tuple[str, ...] | None:
        """Who may use it (`Accounts`, `Groups`, `Qos`); None means all, or all but those that are denied."""
        text = self.facts.get(f"Allow{what}", "ALL")
        return None if text.upper() in ("ALL", "(NULL)", "") else tuple(text.split(","))

    def denied(self, what: str) -> tuple[str, ...]:
        text = self.facts.get(f"Deny{what}", "")
        return tuple(name for name in text.split(",") if name and name.upper() not in ("NONE", "(NULL)"))


def ask_partitions() -> list[Partition] | None:
    """Every partition, hidden ones included; None where Slurm does not answer. Two calls, whatever the size."""
    questions = (
        ("scontrol", "show", "partition", "--oneliner", "--all"),
        ("sinfo", "--all", "--noheader", "--format=%R|%D|%c|%m|%G|%T|%N"),
    )
    with ThreadPoolExecutor() as pool:
        partitions, nodes = pool.map(lambda question: ask(*question), questions)
    return None if partitions is None or nodes is None else parse_partitions(partitions, nodes)


def ask(*command: str) -> str | None:
    """What a command of Slurm's prints; None where it is missing, fails or is silent for too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PATIENCE_S, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def parse_partitions(partitions: str, nodes: str) -> list[Partition]:
    """Partitions of `scontrol show partition --oneliner`, with their nodes of `sinfo --format=%R|%D|%c|%m|%G|%T|%N`."""
    groups = [group for line in nodes.splitlines() if (group := _node_group(line)) is not None]
    found = []
    for facts in map(parse_facts, partitions.splitlines()):
        if name := facts.get("PartitionName"):
            own = tuple(group for group in groups if group.partition == name)
            found.append(Partition(name=name, facts=facts, nodes=own))
    return found


def _node_group(line: str) -> NodeGroup | None:
    """The nodes of a line of sinfo; None for a line of another form."""
    if line.count("|") != 6:
        return None
    partition, count, cpus, memory, gres, state, names = line.split("|")
    # `16+` where nodes of one line differ.
    counts = [number(text.removesuffix("+")) for text in (count, cpus, memory)]
    if None in counts:
        return None
    num_nodes, num_cpus, memory_mb = (count or 0 for count in counts)
    return NodeGroup(
        partition=partition,
        num_nodes=num_nodes,
        cpus=num_cpus,
        memory_mb=memory_mb,
        gpus=sum(map(int, _GPUS.findall(gres))),
        usable=not (state.startswith(_UNUSABLE) or state.endswith("*")),
        names=names,
    )


def parse_memory_mb(text: str) -> float | None:
    """Memory as sbatch takes it (`64G`, `2000`) in MiB; None where it is not of that form."""
    match = _MEMORY.fullmatch(text.strip())
    return int(match[1]) * _MB[match[2].upper()] if match else None


def parse_settings(text: str) -> dict[str, str]:
    """What `scontrol show config` prints, by key."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def seconds(text: str) -> int | None:
    """A duration as Slurm's settings have it (`30 sec`, `2 min`, `30`) in seconds; None where it is none."""
    match = re.fullmatch(r"([0-9]{1,18})(?: (sec|min))?", text.strip())
    return int(match[1]) * (60 if match[2] == "min" else 1) if match else None
