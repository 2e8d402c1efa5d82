"""A Python in which torch is not installed, for the functions that search it."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest


def hide_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `importlib.util.find_spec` find no torch."""
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "torch" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
