"""Slurm's compressed lists, expanded without Slurm: `rack[1-2]-n[08-11]` and `2(x3),1`.

Ranks in a container have no `scontrol show hostnames`, so the grammar of Slurm's `src/common/hostlist.c`
is parsed here. Malformed text that Slurm ignores (an unclosed bracket, an empty name) raises an error. Text after the
last bracket (`n[1-3]-ib`), which Slurm does not accept, is supported::

    names  := name ("," name)*
    name   := (TEXT | group)+                   TEXT: letters, digits, "-", "_", "."
    group  := "[" choice ("," choice)* "]"
    choice := NUMBER | NUMBER "-" NUMBER

Groups multiply in the order of `scontrol show hostnames`: the last one changes fastest, then the first, the second, and
so on (`m[1-2]n[3-4]o[5-6]`: m1n3o5, m1n3o6, m2n3o5, …). A range keeps the width of its first number.
"""

from __future__ import annotations

import re
from typing import NoReturn

from hpcdist.errors import TopologyError, shortened

MAX_HOSTS = 1_000_000
"""A nodelist with more names is rejected before memory is allocated for them."""

_MAX_NAME_LENGTH = 255  # DNS allows no longer name
_PART = re.compile(r"(?P<text>[A-Za-z0-9._-]+)|\[(?P<choices>[^\[\]]*)\]")
_ANOTHER_GROUP = re.compile(r"[^,\[\]]*\[")  # in the rest of the name
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_TASKS = re.compile(r"([1-9][0-9]{0,8})(?:\(x([1-9][0-9]{0,8})\))?")


def expand(nodelist: str) -> list[str]:
    """Return the node names of a nodelist, in its order.

    Raises TopologyError for malformed text, with the position (counted from 1) and the problem, and for more
    than `MAX_HOSTS` names.
    """
    if not nodelist:
        raise TopologyError("the nodelist is empty; give at least one node name")
    hosts: list[str] = []
    start = 0
    while True:
        names, end = _names(nodelist, start)
        if any(name.startswith("-") for name in names):  # would be an option on a command line
            _fail(nodelist, start, "a node name cannot begin with '-'")
        _check_count(nodelist, start, len(hosts) + len(names))
        hosts.extend(names)
        if end == len(nodelist):
            return hosts
        if nodelist[end] != ",":
            _fail(nodelist, end, "']' without '['")
        start = end + 1


def expand_tasks(text: str) -> list[int]:
    """Return the number of tasks of each node, in node order: `2(x3),1` gives [2, 2, 2, 1].

    Raises TopologyError for anything else, for a node without tasks, and for more than `MAX_HOSTS` nodes.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise TopologyError(
                f"tasks per node {shortened(text)!r}: {shortened(part)!r} is not a count like 2 or 2(x3); "
                "use the value that Slurm sets"
            )
        times = int(match[2] or 1)
        if len(counts) + times > MAX_HOSTS:
            raise TopologyError(f"tasks per node {shortened(text)!r}: more than {MAX_HOSTS:,} nodes; check the value")
        counts.extend([int(match[1])] * times)
    return counts


def _names(nodelist: str, start: int) -> tuple[list[str], int]:
    """Return text and groups up to a comma, a closing bracket or the end, multiplied out, and the end's position."""
    names, end = [""], start
    while end < len(nodelist) and nodelist[end] not in ",]":
        part = _PART.match(nodelist, end)
        if part is None:
            bracket = nodelist[end] == "["
            _fail(nodelist, end, "'[' without ']'" if bracket else f"{nodelist[end]!r} is not allowed in a node name")
        found = [part["text"]] if part["text"] else _numbers(nodelist, end, part["choices"])
        _check_count(nodelist, start, len(names) * len(found))
        if max(map(len, names)) + max(map(len, found)) > _MAX_NAME_LENGTH:
            _fail(nodelist, start, f"a node name of more than {_MAX_NAME_LENGTH} characters begins here")
        end = part.end()
        if _ANOTHER_GROUP.match(nodelist, end):
            names = [left + right for right in found for left in names]
        else:
            names = [left + right for left in names for right in found]
    if end == start:
        _fail(nodelist, start, "a node name is missing")
    return names, end


def _numbers(nodelist: str, start: int, choices: str) -> list[str]:
    """Return the numbers of the group that begins at `start`; a range keeps the width of its first number."""
    numbers: list[str] = []
    place = start + 1
    for choice in choices.split(","):
        match = _RANGE.fullmatch(choice)
        if match is None:
            _fail(nodelist, place, f"expected a number or a range like 1-3, got {shortened(choice)!r}")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            _fail(nodelist, place, f"the range {choice} runs backwards")
        _check_count(nodelist, place, high - low + 1)
        _check_count(nodelist, start, len(numbers) + high - low + 1)
        numbers.extend(f"{number:0{len(match[1])}d}" for number in range(low, high + 1))
        place += len(choice) + 1
    return numbers


def _check_count(nodelist: str, place: int, num_hosts: int) -> None:
    if num_hosts > MAX_HOSTS:
        _fail(nodelist, place, f"more than {MAX_HOSTS:,} names")


def _fail(nodelist: str, place: int, problem: str) -> NoReturn:
    raise TopologyError(
        f"nodelist {shortened(nodelist)!r}, character {place + 1}: {problem}; "
        "expected a form like n1,n[2-4],rack[1-2]-n[08-11]"
    )
