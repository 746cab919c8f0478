"""Bytes, seconds and counts as a person reads them."""

from __future__ import annotations

MIB, GIB = 2**20, 2**30


def size(count: int) -> str:
    """Bytes in powers of 1024, with three digits."""
    amount, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1000 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{amount:.3g} {units[0]}"


def unit_of_bytes(most: int) -> tuple[int, str]:
    """The unit for numbers up to so many bytes, and its name."""
    return (GIB, "GiB") if most >= 4 * GIB else (MIB, "MiB")


def seconds(duration: float) -> str:
    """Seconds or milliseconds, with three digits."""
    return f"{duration:.3g} s" if duration >= 1 else f"{duration * 1000:.3g} ms"


def ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def listed(words: list[str]) -> str:
    """a; a and b; a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
