"""Sizes in words."""

from __future__ import annotations

UNITS = ("B", "kB", "MB", "GB", "TB")


def in_bytes(count: float) -> str:
    """Return a number of bytes with three digits in the largest decimal unit that keeps it at least 1 (``226 kB``)."""
    for unit in UNITS[:-1]:
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {UNITS[-1]}"
