"""Time limits for calls that may block for ever, such as access to a dead file server: they run in daemon threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start(work: Callable[[], T]) -> Future[T]:
    """Start a call in a daemon thread, which does not keep the process alive."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a running thread cannot be cancelled

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def within(limit_s: float, work: Callable[[], T]) -> T:
    """Return or raise the result of `work`; raise TimeoutError after the limit, while the thread continues."""
    return start(work).result(limit_s)


def done_within(limit_s: float, future: Future[T], otherwise: T) -> T:
    """Return the result of a started call, or `otherwise` after the limit."""
    try:
        return future.result(limit_s)
    except TimeoutError:
        return otherwise
