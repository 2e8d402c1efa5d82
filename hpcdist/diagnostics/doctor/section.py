"""Sections of doctor's report: each runs in its own thread, and a timeout becomes a warning of the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hpcdist.machine.check import Check, warning
from hpcdist.machine.time_limit import start


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
