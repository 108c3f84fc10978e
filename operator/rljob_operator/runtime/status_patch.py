"""The difference between two statuses as a JSON merge patch (RFC 7386)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch that makes `old` into `new`: absent keys become null, lists are replaced whole; empty when equal."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        old_value = old.get(key)
        if isinstance(value, Mapping) and isinstance(old_value, Mapping):
            if changes := difference(old_value, value):
                patch[key] = changes
        elif key not in old or old_value != value:
            patch[key] = value
    return patch
