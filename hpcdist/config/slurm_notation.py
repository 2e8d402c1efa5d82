"""Slurm's notations of nodes, tasks and time limits, read without Slurm: `rack[1-2]-n[08-11]`, `2(x3)`, `1-00:00:00`.

Ranks in a container have no `scontrol show hostnames`, so the grammar of Slurm's `src/common/hostlist.c` is parsed
here. Malformed text that Slurm ignores (an unclosed bracket, an empty name) raises an error. Text after the last
bracket (`n[1-3]-ib`), which Slurm does not accept, is supported.

Groups multiply in the order of `scontrol show hostnames`: the last one changes fastest, then the first, the second, and
so on (`m[1-2]n[3-4]o[5-6]`: m1n3o5, m1n3o6, m2n3o5, …). A range keeps the width of its first number.
"""

import re
from typing import NoReturn

from hpcdist.errors import TopologyError, shortened

#: A nodelist with more names is rejected before memory is allocated for them.
MAX_HOSTS = 1_000_000
_MAX_NAME_LENGTH = 255  # DNS allows no longer name
_MINUTES_PER_DAY = 24 * 60
_GROUP = re.compile(r"\[[^\[\]]*\]")
#: `-` at the beginning would be an option on a command line.
_NAME = re.compile(r"(?!-)(?:[A-Za-z0-9._-]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_TASKS = re.compile(r"([1-9][0-9]{0,8})(?:\(x([1-9][0-9]{0,8})\))?")


def minutes_of(text: str) -> float | None:
    """Return a time limit as Slurm writes it (`1-00:00:00`, `30:00`, `90`) in minutes; None for other text."""
    match = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text, re.ASCII)
    if match is None:
        return None
    days, *given = match.groups()
    parts = [int(part) for part in given if part is not None]
    has_seconds = given[-1] is not None
    if days is None and not has_seconds:
        parts = [0, *parts]  # minutes, or minutes and seconds
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return int(days or 0) * _MINUTES_PER_DAY + hours * 60 + minutes + seconds / 60


def expand(nodelist: str) -> list[str]:
    """Return the node names of a nodelist, in its order. Raises TopologyError."""
    hosts: list[str] = []
    # Commas inside of brackets separate no names.
    for name in _GROUP.sub(lambda group: group[0].replace(",", "\0"), nodelist).split(","):
        if _NAME.fullmatch(name) is None:
            _fail(nodelist, f"{shortened(name.replace(chr(0), ','))!r} is not a node name")
        names = [""]
        num_groups = name.count("[")
        for choices, text in _PART.findall(name):
            if text:
                parts = [text]
            else:
                parts = _numbers(nodelist, choices)
                num_groups -= 1
            if len(hosts) + len(names) * len(parts) > MAX_HOSTS:
                _fail(nodelist, f"more than {MAX_HOSTS:,} names")
            if max(map(len, names)) + max(map(len, parts)) > _MAX_NAME_LENGTH:
                _fail(nodelist, f"a node name of more than {_MAX_NAME_LENGTH} characters")
            if num_groups:
                names = [left + right for right in parts for left in names]
            else:  # the last group changes fastest
                names = [left + right for left in names for right in parts]
        hosts += names
    return hosts


def expand_tasks(text: str) -> list[int]:
    """Return the number of tasks of each node, in node order: `2(x3),1` gives [2, 2, 2, 1]. Raises TopologyError."""
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


def _numbers(nodelist: str, choices: str) -> list[str]:
    """Return the numbers in the brackets of a nodelist, such as `08-10` and `12`, separated by NUL characters."""
    numbers: list[str] = []
    for choice in choices.split("\0"):
        match = _RANGE.fullmatch(choice)
        if match is None:
            _fail_range(nodelist, choice)
        first, last = match[1], match[2] or match[1]
        low, high = int(first), int(last)
        if high < low:
            _fail_range(nodelist, choice)
        if len(numbers) + high - low >= MAX_HOSTS:
            _fail(nodelist, f"more than {MAX_HOSTS:,} names")
        width = len(first)
        numbers.extend(f"{number:0{width}d}" for number in range(low, high + 1))
    return numbers


def _fail_range(nodelist: str, choice: str) -> NoReturn:
    _fail(nodelist, f"expected a number or a range like 1-3, got {shortened(choice)!r}")


def _fail(nodelist: str, problem: str) -> NoReturn:
    raise TopologyError(
        f"nodelist {shortened(nodelist)!r}: {problem}; expected a form like n1,n[2-4],rack[1-2]-n[08-11]"
    )
