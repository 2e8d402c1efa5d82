"""Run a command once on each node of a job, in a step beside other steps, and read one answer of each node.

Each line of the protocol has the name of its node, so it does not depend on srun's labels, and other output is ignored:

    hpcdist-node n1                the node has started the command (`announced`)
    hpcdist-node n1 0/2 {"copied"  piece 0 of 2 of the node's answer, a JSON object
"""

import json
import math
import os
import re
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpcdist.host.json_files import parse_object
from hpcdist.host.time_limits import run_within

#: Name of the step, unless its user has a name of its own.
NODES_STEP = "hpcdist-nodes"
#: srun waits for nodes that do not answer. An impatient caller waits this long after the last start of the command on
#: a node, and this long for the first start: Slurm's messages time out after 10 s.
PATIENCE_S = 4.0
FIRST_ANSWER_S = 20.0
_MARK = "hpcdist-node"
#: srun splits a task's output after 1,024 bytes and inserts labels or the output of other tasks.
_PIECE = 800
_LINE = re.compile(rf"{_MARK} (\S+)(?: ([0-9]{{1,6}})/([0-9]{{1,6}}) (.*))?")


@dataclass(frozen=True)
class JobNodes:
    """The nodes of a job on which a step runs."""

    names: Sequence[str]
    chosen: bool = False  #: whether hpcdist has chosen these nodes: then the allocation may have more


class Answers(NamedTuple):
    """The answers of nodes to a command, and how the step ended."""

    by_node: Mapping[str, dict[str, Any]]
    started: set[str]  #: nodes that have announced the command or answered it
    errors: str  #: error output of srun
    #: Whether the step was killed: at its limit, or because an impatient caller expects no more answers.
    was_killed: bool


# Before the step: its command line.


def srun_words(flags: Mapping[str, Any]) -> list[str]:
    """Return the words of options: True is an option without a value, None leaves it out."""
    words = []
    for name, value in flags.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


def task_words(nodes: Sequence[str], command: Sequence[str], name: str, flags: Mapping[str, Any]) -> list[str]:
    """Return the words behind `srun` for one task on each node beside other steps; `flags` take precedence."""
    count = len(nodes)
    defaults = {
        "job-name": name,
        "overlap": True,
        "nodes": count,
        "ntasks": count,
        "ntasks-per-node": 1,
        "cpus-per-task": 1,
        "input": "none",
    }
    return [*srun_words({**defaults, **flags}), *command]


def nodes_command(nodes: JobNodes, command: Sequence[str]) -> list[str]:
    """Return the step that runs a command on each node of the current job."""
    flags = {}
    if nodes.chosen:
        flags["nodelist"] = ",".join(nodes.names)
    return ["srun", *task_words(nodes.names, command, NODES_STEP, flags)]


def announced(command: Sequence[str]) -> list[str]:
    """Return a command that first shows that its node has started it, before Python is loaded from a slow disk."""
    return ["sh", "-c", f'echo {_MARK} "$SLURMD_NODENAME"; exec "$@"', "sh", *command]


# On the node.


def node_name(env: Mapping[str, str] = os.environ) -> str:
    """Return this node's name in Slurm, or its host name outside of Slurm."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def print_answer(answer: Mapping[str, Any]) -> None:
    """Print this node's answer for `ask`."""
    sys.stdout.write("".join(f"{line}\n" for line in answer_lines(node_name(), answer)))
    sys.stdout.flush()


def answer_lines(node: str, answer: Mapping[str, Any]) -> list[str]:
    """Split an answer into lines that are short enough for srun."""
    text = json.dumps(answer, separators=(",", ":"))
    parts = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    return [f"{_MARK} {node} {number}/{len(parts)} {part}" for number, part in enumerate(parts)]


# After the step: its output.


def ask(
    step: Sequence[str], nodes: Collection[str], limit_s: float, *, env: Mapping[str, str], patient: bool = True
) -> Answers:
    """Run a step and return the answers of nodes; end it after `limit_s` seconds.

    An impatient caller runs an announced command: `limit_s` begins with the last start on a node, and nodes without a
    start are given up after PATIENCE_S.
    """
    if patient:
        done = run_within(step, limit_s, env=env)
    else:
        done = run_within(step, math.inf, env=env, is_enough=_Enough(nodes, limit_s))
    answers = _answers_of(nodes, done.stdout)
    return Answers(
        by_node={node: answer for node, answer in answers.items() if answer is not None},
        started=set(answers),
        errors=done.stderr,
        was_killed=done.returncode < 0,
    )


def _answers_of(nodes: Collection[str], text: str) -> dict[str, dict[str, Any] | None]:
    """Return the result of `read_answers` for some nodes only."""
    return {node: answer for node, answer in read_answers(text).items() if node in nodes}


def read_answers(text: str) -> dict[str, dict[str, Any] | None]:
    """Return the last complete answer of each node in the output of all tasks; None for nodes without one."""
    pieces: dict[str, dict[int, str]] = {}
    answers: dict[str, dict[str, Any] | None] = {}
    for line in text.splitlines():
        match = _LINE.search(line)
        if match is None:
            continue
        node, number, total, piece = match.groups()
        answers.setdefault(node, None)
        if number is None:
            continue
        received = pieces.setdefault(node, {})
        received[int(number)] = piece
        is_complete = len(received) == int(total) and max(received) == int(total) - 1
        if is_complete:
            del pieces[node]
            with suppress(ValueError):
                answers[node] = parse_object("".join(received[index] for index in sorted(received)))
    return answers


def lines_of_task(text: str, task: int) -> str:
    """Return the lines of a task in output with `srun --label`."""
    return "\n".join(re.findall(rf"^\s*0*{task}: (.*)$", text, re.MULTILINE))


class _Enough:
    """Decides by the output so far whether no more answers are expected; see `ask`."""

    def __init__(self, nodes: Collection[str], limit_s: float) -> None:
        self._nodes = {*nodes}
        self._limit_s = limit_s
        self._began = self._changed = time.monotonic()
        self._num_started = 0

    def __call__(self, output: str) -> bool:
        now = time.monotonic()
        answers = _answers_of(self._nodes, output)
        if len(answers) != self._num_started:
            self._num_started = len(answers)
            self._changed = now
        if not answers:
            return now - self._began > FIRST_ANSWER_S
        unchanged_s = now - self._changed
        started_have_answered = None not in answers.values() or unchanged_s > self._limit_s
        no_more_start = answers.keys() == self._nodes or unchanged_s > PATIENCE_S
        return started_have_answered and no_more_start
