"""The decorator of fuzz targets, with limits on memory and processor time, and the profiles of Hypothesis."""

import atexit
import functools
import json
import os
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.strategies import SearchStrategy

from hpcdist.errors import ConfigError, HpcdistError

#: `make fuzz` sets both: the folder for failing examples and counts, and the number of examples per round.
FOLDER = "FUZZ_FOLDER"
EXAMPLES = "FUZZ_EXAMPLES"
CPU_LIMIT_S = 20.0
MEMORY_LIMIT_BYTES = 2 * 2**30
MAX_LINE = 500
MAX_LINES = 25
EXECUTED: Counter[str] = Counter()

_SKIPPED_CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture)
settings.register_profile(
    "fixed", derandomize=True, database=None, deadline=None, suppress_health_check=_SKIPPED_CHECKS, max_examples=30
)
if folder := os.environ.get(FOLDER):
    settings.register_profile(
        "long",
        deadline=None,
        suppress_health_check=_SKIPPED_CHECKS,
        max_examples=int(os.environ[EXAMPLES]),
        database=DirectoryBasedExampleDatabase(Path(folder) / "examples"),
        print_blob=True,
    )

    @atexit.register
    def _add_counts() -> None:
        path = Path(os.environ[FOLDER]) / "executed.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(Counter(before) + EXECUTED))


settings.load_profile("long" if folder else "fixed")


class TooSlow(BaseException):
    """An example took more processor time than CPU_LIMIT_S; a BaseException, so that `except Exception` misses it."""


def fuzz(share: float = 1.0, **strategies: SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test a fuzz target: each example runs within the limits and is counted.

    Args:
        share: part of the profile's number of examples that this target gets.
        strategies: one for each argument that Hypothesis draws.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def limited(*args: Any, **kwargs: Any) -> None:
            EXECUTED[test.__name__.removeprefix("test_")] += 1
            with limits():
                test(*args, **kwargs)

        count = max(1, round(settings().max_examples * share))
        return settings(max_examples=count)(given(**strategies)(limited))

    return decorate


@contextmanager
def limits() -> Iterator[None]:
    """Limit the memory and the processor time of the block."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TooSlow(f"more than {CPU_LIMIT_S:g} s of processor time")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGVTALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_LIMIT_BYTES, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


def check_message(error: HpcdistError) -> None:
    """Assert that a message is bounded in the number and length of its lines."""
    lines = str(error).splitlines()
    assert lines, "an empty message"
    assert len(lines) <= MAX_LINES, f"{len(lines)} lines"
    assert max(map(len, lines)) <= MAX_LINE, f"a line of {max(map(len, lines))} characters: {max(lines, key=len)}"
    str(error).encode()
    if isinstance(error, ConfigError):
        assert error.problems
        assert error.exit_code == 2
