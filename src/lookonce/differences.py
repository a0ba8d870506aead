"""The differences between two nested settings, which messages about caches and run folders list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Difference = tuple[str, Any, Any]
"""Dotted name, the first value, the second value; None where the key is missing."""


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """The keys whose values differ, sorted by name."""
    mine, theirs = flatten(mine), flatten(theirs)
    names = sorted(mine.keys() | theirs.keys())
    return [(name, mine.get(name), theirs.get(name)) for name in names if mine.get(name) != theirs.get(name)]


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level with dotted names."""
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat |= flatten(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {f"{prefix}{name}": item}
    return flat
