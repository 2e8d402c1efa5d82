"""Names and texts that MLflow accepts for metrics, parameters and tags.

MLflow allows letters, digits, `_`, `-`, `.`, `:`, space and `/`, at most 250 characters, and only normalized relative
paths. `clean_name` maps any name to an allowed one and is injective, so that two metrics never share a series: an
allowed name is unchanged, any other name is cleaned and ends with a hash of the original.
"""

import functools
import hashlib
import logging
import posixpath
import re

#: Maximum numbers of characters of the values of a parameter and a tag, as in MLflow.
MAX_PARAM, MAX_TAG = 6000, 8000
MAX_NAME = 250
_NOT_IN_NAMES = re.compile(r"[^\w./: -]")
#: End of a changed name. An allowed name with such an end is changed as well, since it could equal a changed one.
_SUFFIX = re.compile(r"--[0-9a-f]{12}")
_SUFFIX_CHARS = 14
#: Length of a name in a log line.
_SHOWN_CHARS = 80

log = logging.getLogger(__name__)


def hash_suffix(name: str) -> str:
    """Return the end of a changed name: a hash of the original name."""
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
    """Return `name` as MLflow accepts it: `loss[0]` becomes `loss_0_--` and 12 hexadecimal digits, with a warning."""
    if is_allowed(name) and not _SUFFIX.fullmatch(name[-_SUFFIX_CHARS:]):
        return name
    parts = _NOT_IN_NAMES.sub("_", name[: 4 * MAX_NAME]).split("/")
    normalized = "/".join(part for part in parts if part.strip("."))
    stem = normalized[: MAX_NAME - _SUFFIX_CHARS].rstrip("/") or "_"
    if stem.startswith(".."):
        stem = "_" + stem[1:]
    cleaned = stem + hash_suffix(name)
    shown = name
    if len(name) > _SHOWN_CHARS:
        shown = f"{name[:_SHOWN_CHARS]}… ({len(name)} characters)"
    _note_change(shown, cleaned)
    return cleaned


@functools.cache  # each record of a run with many names would repeat the warning
def _note_change(shown: str, cleaned: str) -> None:
    log.warning("MLflow does not accept the name %r: it is uploaded as %r", shown, cleaned)


def cut_with_mark(text: str, limit: int) -> str:
    """Return a text of at most `limit` characters; one that is cut ends with the number of its characters."""
    if len(text) <= limit:
        return text
    mark = f"… (cut, {len(text)} characters)"
    return text[: limit - len(mark)] + mark
