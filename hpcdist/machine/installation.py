"""The commands in messages that install optional dependencies of hpcdist."""

from __future__ import annotations


def install_command(*extras: str) -> str:
    """Return the command that installs hpcdist with optional dependencies, and where to call it.

    hpcdist is not on a package index: pip would find no package of that name, or that of a stranger.
    """
    return f"`pip install '.[{','.join(extras)}]'` in a checkout of hpcdist"
