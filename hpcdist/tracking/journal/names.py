"""Names that MLflow accepts for metrics, parameters and tags.

MLflow allows letters, digits, `_`, `-`, `.`, `:`, space and `/`, at most 250 characters, and only normalized relative
paths. `clean_name` maps any name to an allowed one and is injective, so that two metrics never share a series: an
allowed name is unchanged, any other name is cleaned and ends with a hash of the original.
"""

from __future__ import annotations

import functools
import hashlib
import posixpath
import re

MAX_NAME = 250
#: Metric of the shipper, with one point per attempt.
ATTEMPT_METRIC = "attempt"
_NOT_IN_NAMES = re.compile(r"[^\w./: -]")
#: End of a changed name. An allowed name with such an end is changed as well, since it could equal a changed one.
_SUFFIX = re.compile(r"--[0-9a-f]{12}")
_SUFFIX_CHARS = 14


def suffix(name: str) -> str:
    """Return `--` and 48 bits of the name's SHA-256 as 12 hexadecimal digits."""
    return "--" + hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:12]


def is_allowed(name: str) -> bool:
    """Return whether MLflow accepts a name as it is."""
    return (
        0 < len(name) <= MAX_NAME
        and not _NOT_IN_NAMES.search(name)
        and posixpath.normpath(name) == name
        and name != "."
        and not name.startswith(("..", "/"))
    )


@functools.lru_cache(maxsize=10_000)
def clean_name(name: str) -> str:
    """Return `name` as MLflow accepts it: `loss[0]` becomes `loss_0_--` and 12 hexadecimal digits."""
    if is_allowed(name) and not _SUFFIX.fullmatch(name[-_SUFFIX_CHARS:]):
        return name
    parts = [part for part in _NOT_IN_NAMES.sub("_", name[: 4 * MAX_NAME]).split("/") if part.strip(".")]
    stem = "/".join(parts)[: MAX_NAME - _SUFFIX_CHARS].rstrip("/") or "_"
    return ("_" + stem[1:] if stem.startswith("..") else stem) + suffix(name)


def clean_metric_name(name: str) -> str:
    """Return a metric's name as `clean_name` does, and change the reserved name of the metric `attempt`."""
    return ATTEMPT_METRIC + suffix(name) if name == ATTEMPT_METRIC else clean_name(name)
