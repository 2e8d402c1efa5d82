"""The version of pyxis, which neither srun nor Slurm's settings contain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from glob import glob
from pathlib import Path

_SETTING = re.compile(r"^(SLURM_CONF|PluginDir)\s*=\s*(\S+)", re.MULTILINE)
#: A text of the plugin, which slurmd logs at its start.
_VERSION = re.compile(rb"pyxis: version v?(\d[\w.+-]*)")
#: Files in which plugstack.conf may include further ones.
_MAX_DEPTH = 4


def pyxis_version(settings: str) -> str:
    """Return the version in the file of the plugin that plugstack.conf names; empty if this machine has none.

    Args:
        settings: output of `scontrol show config`.
    """
    found = dict(_SETTING.findall(settings))
    with suppress(OSError):
        for plugin in _plugins(
            Path(found.get("SLURM_CONF", "/etc/slurm/slurm.conf")).with_name("plugstack.conf"), _MAX_DEPTH
        ):
            if match := _VERSION.search((Path(found.get("PluginDir", "/")) / plugin).read_bytes()):
                return match[1].decode()
    return ""


def _plugins(config: Path, depth: int) -> Iterator[str]:
    """Yield the files of plugins whose names contain `pyxis`, also those of included files."""
    for line in config.read_text().splitlines():
        words = line.partition("#")[0].split()
        if words[:1] == ["include"] and depth:
            for path in sorted(glob(str(config.parent / words[1]))):
                yield from _plugins(Path(path), depth - 1)
        elif len(words) > 1 and "pyxis" in words[1]:
            yield words[1]
