"""Sizes for people."""

MIB = 1 << 20
GIB = 1 << 30


def gib(nbytes: float) -> str:
    """`nbytes` in GiB, with one decimal."""
    return f"{nbytes / GIB:.1f} GiB"


def mib(nbytes: int) -> str:
    """`nbytes` in whole MiB."""
    return f"{nbytes / MIB:.0f} MiB"
