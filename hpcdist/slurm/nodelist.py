"""Slurm's compressed lists, expanded without Slurm: `rack[1-2]-n[08-11]` and `2(x3),1`.

Ranks in a container have no `scontrol show hostnames`, so the grammar of Slurm's `src/common/hostlist.c`
is parsed here. Malformed text that Slurm ignores (an unclosed bracket, an empty name) raises an error. Two forms
that Slurm does not accept are supported: text after the last bracket (`n[1-3]-ib`), and nested brackets
(`a[1-2,b[3-4]]` is a1, a2, ab3, ab4)::

    names  := name ("," name)*
    name   := (TEXT | group)+                   TEXT: letters, digits, "-", "_", "."
    group  := "[" choice ("," choice)* "]"
    choice := NUMBER | NUMBER "-" NUMBER | a name that holds a group

Groups multiply, the rightmost fastest; a range keeps the width of its first number.
"""

from __future__ import annotations

import re
from typing import NoReturn

from hpcdist.errors import TopologyError, shortened

MAX_HOSTS = 1_000_000
"""A nodelist with more names is rejected before memory is allocated for them."""

_MAX_NAME_LENGTH = 255  # DNS allows no longer name
_MAX_DEPTH = 8
_TEXT = re.compile(r"[A-Za-z0-9._-]+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?(?=[,\]])")
_CHOICE_HEAD = re.compile(r"[^,\[\]]*")
_LOOKS_LIKE_RANGE = re.compile(r"[0-9]+-[0-9]+")
_TASKS = re.compile(r"([1-9][0-9]{0,8})(?:\(x([1-9][0-9]{0,8})\))?")


def expand(nodelist: str) -> list[str]:
    """Return the node names of a nodelist, in its order.

    Raises TopologyError for malformed text, with the position (counted from 1) and the problem, and for more
    than `MAX_HOSTS` names.
    """
    return _NodelistParser(nodelist).parse()


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


class _NodelistParser:
    """Recursive descent over `text`; `pos` is the next character to read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0

    def parse(self) -> list[str]:
        if not self.text:
            raise TopologyError("the nodelist is empty; give at least one node name")
        hosts: list[str] = []
        while True:
            start = self.pos
            names = self.name(depth=0)
            if any(name.startswith("-") for name in names):  # would be an option on a command line
                self.fail("a node name cannot begin with '-'", start)
            self.check_count(len(hosts) + len(names), start)
            hosts.extend(names)
            if self.pos == len(self.text):
                return hosts
            if self.peek() != ",":
                self.fail("']' without '['", self.pos)
            self.pos += 1

    def name(self, depth: int) -> list[str]:
        """Text and groups up to a comma, a closing bracket or the end, multiplied out."""
        start = self.pos
        names = [""]
        while self.peek() not in ("", ",", "]"):
            part = self.group(depth + 1) if self.peek() == "[" else self.literal()
            self.check_count(len(names) * len(part), start)
            if max(map(len, names)) + max(map(len, part)) > _MAX_NAME_LENGTH:
                self.fail(f"a node name of more than {_MAX_NAME_LENGTH} characters begins here", start)
            names = [left + right for left in names for right in part]
        if self.pos == start:
            self.fail("a node name is missing", start)
        return names

    def literal(self) -> list[str]:
        match = _TEXT.match(self.text, self.pos)
        if match is None:
            self.fail(f"{self.peek()!r} is not allowed in a node name", self.pos)
        self.pos = match.end()
        return [match[0]]

    def group(self, depth: int) -> list[str]:
        start = self.pos
        if depth > _MAX_DEPTH:
            self.fail(f"brackets are nested deeper than {_MAX_DEPTH}", start)
        if self.text.find("]", start) < 0:
            self.fail("'[' without ']'", start)
        choices: list[str] = []
        while self.peek() != "]":
            self.pos += 1  # past the bracket, or past the comma between two choices
            choice = self.choice(depth)
            self.check_count(len(choices) + len(choice), start)
            choices.extend(choice)
            if self.peek() == "":
                self.fail("'[' without ']'", start)
        self.pos += 1
        return choices

    def choice(self, depth: int) -> list[str]:
        start = self.pos
        match = _RANGE.match(self.text, start)
        if match is None:
            return self.nested_name(depth)
        self.pos = match.end()
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            self.fail(f"the range {match[0]} runs backwards", start)
        self.check_count(high - low + 1, start)
        width = len(match[1])
        return [f"{number:0{width}d}" for number in range(low, high + 1)]

    def nested_name(self, depth: int) -> list[str]:
        head = _CHOICE_HEAD.match(self.text, self.pos)
        assert head is not None, "the pattern also matches nothing"
        # "1-2[3-4]" is ambiguous: a range, or the name "1-23".
        if self.text[head.end() : head.end() + 1] != "[" or _LOOKS_LIKE_RANGE.fullmatch(head[0]):
            self.fail(f"expected a number or a range like 1-3, got {shortened(head[0])!r}", self.pos)
        return self.name(depth)

    def peek(self) -> str:
        return self.text[self.pos : self.pos + 1]

    def check_count(self, num_hosts: int, pos: int) -> None:
        if num_hosts > MAX_HOSTS:
            self.fail(f"more than {MAX_HOSTS:,} names", pos)

    def fail(self, problem: str, pos: int) -> NoReturn:
        raise TopologyError(
            f"nodelist {shortened(self.text)!r}, character {pos + 1}: {problem}; "
            "expected a form like n1,n[2-4],rack[1-2]-n[08-11]"
        )
