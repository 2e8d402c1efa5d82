"""Configs as nested mappings: leaves, overrides by dotted key, and the short forms of sections."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcdist.config.document import parse

#: Sections that may be written as one value, each with the key that this value sets.
SHORT_FORMS = {"trainer": "target", "preflight": "mode"}
#: A range of numbers of nodes: `cluster.nodes: 2-8`.
NODE_RANGE = "^[0-9]{1,9}-[0-9]{1,9}$"


def leaves(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each value that is not a mapping, or is an empty one, with the keys that lead to it.

    Keys are a tuple, not a dotted path, because free keys such as MLflow's tags may contain dots.
    """
    for key, value in tree.items():
        path = (*above, str(key))
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of nested mappings by dotted key."""
    return {".".join(path): value for path, value in leaves(tree)}


def parse_value(raw: str) -> Any:
    """Return the value of an override, read as YAML; invalid YAML is text."""
    try:
        return parse(raw)
    except ValueError:
        return raw


def expand_short_forms(tree: dict[str, Any]) -> None:
    """Replace short forms: `trainer: ddp`, `preflight: off`, `cluster.nodes: 2-8`."""
    for section in SHORT_FORMS:
        _expand(tree, section)
    cluster = tree.get("cluster")
    if isinstance(cluster, dict) and re.match(NODE_RANGE, nodes := str(cluster.get("nodes"))):
        least, _, most = nodes.partition("-")
        if cluster.get("min_nodes") is None:
            cluster["min_nodes"] = int(least)
        cluster["nodes"] = int(most)


def insert(tree: dict[str, Any], path: Sequence[str], value: Any) -> bool:
    """Set a value in nested dicts. Return False if a part of the path is a value already."""
    *parents, leaf = path
    for index, parent in enumerate(parents):
        if index == 0:
            _expand(tree, parent)
        child = tree.setdefault(parent, {})
        if child is None:
            child = tree[parent] = {}
        if not isinstance(child, dict):
            return False
        tree = child
    tree[leaf] = value
    return True


def _expand(tree: dict[str, Any], section: str) -> None:
    value = tree.get(section)
    if value is False:
        value = "off"  # which YAML reads as a boolean
    if section in SHORT_FORMS and isinstance(value, str):
        tree[section] = {SHORT_FORMS[section]: value}
