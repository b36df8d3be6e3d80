"""Types of options that several programs take: sizes in bytes, and lists of names."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence

_UNITS = {
    "": 1,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}


def parse_size(text: str) -> int:
    """Bytes of "4", "4K" (4096, as in nccl-tests), "4KB" (4000) or "4KiB" (4096)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"size {text!r}: give for example 4, 64K, 64M or 25MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_sizes(text: str) -> list[int]:
    """Bytes of "4K,1M,25MB", or of a range "first:last[:factor]", factor 4 unless given."""
    if ":" not in text:
        return [parse_size(part) for part in text.split(",")]
    first, last, *factor = text.split(":")
    begin, end = parse_size(first), parse_size(last)
    try:
        step = float(factor[0]) if factor else 4.0
    except ValueError:
        step = 0.0
    if len(factor) > 1 or step <= 1 or not 0 < begin <= end:
        raise argparse.ArgumentTypeError(f"range {text!r}: give first:last[:factor], factor > 1")
    sizes: list[int] = []
    size = float(begin)
    while size < end:
        sizes.append(round(size))
        size *= step
    return [*sizes, end]


def list_of(names: Sequence[str] | None) -> Callable[[str], list[str]]:
    """The type of an option that takes several of the names, with commas between; None: any."""

    def parse(text: str) -> list[str]:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        for part in parts:
            if names is not None and part not in names:
                raise argparse.ArgumentTypeError(f"{part!r}: choose from {', '.join(names)}")
        return list(dict.fromkeys(parts))

    return parse
