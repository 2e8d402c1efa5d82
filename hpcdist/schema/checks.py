"""Checks that sections share: each gives a list of mistakes, a line a mistake."""

from __future__ import annotations


def check(problems: list[str]) -> None:
    """Raise one ValueError with a line a mistake; config.py puts the section's name in front of each."""
    if problems:
        raise ValueError("\n".join(problems))


def at_least(section: object, low: float, *names: str) -> list[str]:
    values = {name: getattr(section, name) for name in names}
    return [
        f"{name} must be >= {low:g}, got {value}"
        for name, value in values.items()
        if value is not None and not value >= low
    ]


def above(section: object, low: float, *names: str) -> list[str]:
    values = {name: getattr(section, name) for name in names}
    return [
        f"{name} must be > {low:g}, got {value}"
        for name, value in values.items()
        if value is not None and not value > low
    ]


def strings(section: object, name: str) -> list[str]:
    return [
        f"{name}.{key} must be a string, got {value!r}"
        for key, value in getattr(section, name).items()
        if not isinstance(value, str)
    ]
