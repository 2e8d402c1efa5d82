"""Work that may never come back, such as a look at a dead file server: done in threads that nobody has to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start(work: Callable[[], T]) -> Future[T]:
    """Begin something in a thread of its own, which does not keep the process from ending."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # nobody can stop it

    def carry_out() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=carry_out, daemon=True).start()
    return future


def within(limit_s: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises; TimeoutError where it takes longer (it goes on, unheeded)."""
    return start(work).result(limit_s)


def done_within(limit_s: float, future: Future[T], otherwise: T) -> T:
    """What has been begun, or something in its place where it is not done in time."""
    try:
        return future.result(limit_s)
    except TimeoutError:
        return otherwise
