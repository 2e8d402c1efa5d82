"""Parts of the doctor's page: each is looked at in a thread of its own, and what hangs becomes a finding."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hpcdist.machine.check import Check


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the page.

    Attributes:
        title: as people read it.
        look: returns what was found; it may block, and is left alone when its time is over.
        within_s: how long it may take.
        on_hang: what it means that it does not come back, and what to do.
    """

    title: str
    look: Callable[[], list[Check]]
    within_s: float = 20.0
    on_hang: str = "a file system or service behind it may hang: look at `dmesg`, `df` and `ps` there"


@dataclass
class _Looking:
    section: Section
    done: threading.Event = field(default_factory=threading.Event)
    checks: list[Check] = field(default_factory=list)

    def run(self) -> None:
        try:
            self.checks = self.section.look()
        except Exception as error:  # one part that breaks does not take the page along
            text = f"could not be looked at: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.checks = [Check(name=self.section.title, level="warning", text=text)]
        self.done.set()


def examine(
    sections: Sequence[Section], waiting: Callable[[Sequence[str]], None] = lambda titles: None
) -> Iterator[tuple[str, list[Check]]]:
    """Look at all sections at once; gives title and findings of each, in their order, as soon as they are there.

    Args:
        waiting: told the titles of what is still being looked at, whenever there is a wait.
    """
    looking = [_Looking(section) for section in sections]
    begun = time.monotonic()
    for one in looking:
        # Daemons: a thread that waits for a dead file server must not keep the process.
        threading.Thread(target=one.run, name=one.section.title, daemon=True).start()
    for number, one in enumerate(looking):
        left = one.section.within_s - (time.monotonic() - begun)
        if not one.done.is_set():
            waiting([late.section.title for late in looking[number:] if not late.done.is_set()])
        if one.done.wait(max(0.0, left)):
            yield one.section.title, one.checks
        else:
            text = f"no answer within {one.section.within_s:g} s"
            hung = Check(name=one.section.title, level="warning", text=text, fix=one.section.on_hang)
            yield one.section.title, [hung]
