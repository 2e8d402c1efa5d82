"""Reading of YAML without OmegaConf, whose import and schema take two thirds of the time of loading a config.

For whatever OmegaConf might read in another way, and for all mistakes, these functions leave the text to OmegaConf.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

#: Exponents without a decimal point, such as `3e-4`, are numbers to OmegaConf, but not to PyYAML.
_EXPONENT = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$")
#: Text that could be a number to OmegaConf, if it had no quotes.
_LIKE_NUMBER = re.compile(r"[-+]?(?:[0-9.][0-9_.:eE+-]*|\.inf|\.Inf|\.INF|\.nan|\.NaN|\.NAN)")
#: Begin of anchors, aliases and tags, and the key that merges mappings. Text that contains them is rare.
_REFERENCES = re.compile(r"[&*!]|<<")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(found) != len(node.value):
            raise yaml.YAMLError("duplicate key")
        return found


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def plain_value(text: str) -> Any:
    """Return the value of a YAML text, or None if only OmegaConf can read it.

    The text must be within the bounds of `document.check_bounds`.
    """
    if _REFERENCES.search(text):
        return None
    try:
        value = yaml.load(text, _Loader)  # noqa: S506  # a SafeLoader
    except (ValueError, yaml.YAMLError):
        return None
    return value if is_plain(value, read=True) else None


def is_plain(value: Any, *, read: bool = False) -> bool:
    """Return whether there are only keys and values without a special meaning to OmegaConf.

    Args:
        read: whether PyYAML has read the value, and may have taken a number for text.
    """
    if isinstance(value, dict):
        return all(type(key) is str and is_plain(key) and is_plain(inner, read=read) for key, inner in value.items())
    if isinstance(value, list):
        return all(is_plain(inner, read=read) for inner in value)
    if isinstance(value, str):
        return not ("${" in value or value == "???" or (read and _LIKE_NUMBER.fullmatch(value)))
    return value is None or type(value) in (bool, int, float)
